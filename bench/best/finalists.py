"""Finalists: made, verified and measured by the recipe runner, which resumes them; the way to a decision."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...base.atomic_io import write_atomically
from ...base.option import words_of
from ...base.progress import Progress, ProgressUpdate, SubRun, as_progress, in_words
from ...base.version import VERSION
from ...engine.base.units import parse_tokens
from ...engine.planner.catalog import find_model
from ...quant.methods.options import MethodOptions
from ...quant.model.checkpoint import gguf_file_of
from ...quant.plan.manifest import MANIFEST_NAME
from ...quant.plan.request import QuantizeRequest
from ...quant.source.models import short_name
from ..gate.limits import DEPTH_KEY, PREFIX, GateOutcome, Limit
from ..gate.score_checks import check_promises
from ..gate.verdict import LimitVerdict
from ..load.started_server import preset
from ..quality.chat_items import CHAT_TASKS
from ..quality.passage import DOMAINS
from ..quality.summary import score_of
from ..record.result import RunData, plain
from ..session.run_sessions import run_bench, write_run
from ..studies.recipe import Recipe, server_words
from ..studies.recipe_files import Stages, VariantRun
from ..studies.recipe_run import bench_options, run_variant, with_reference
from .best_page import best_page
from .decision import UNSURE, choose, decide, next_finalist, points_of
from .first_answer import (
    FIRST_TOKENS,
    SO_FAR,
    BudgetedProgress,
    first_answer,
    first_best,
    first_sentence,
    make_first,
    plan_usual,
    read_first,
)
from .search import Target, search
from .target import DEFAULT_BUDGET, BestRequest, PlanContext, open_folder, whole_scores

FINALISTS, ANSWER, DECISION_NAME, PAGE_NAME = "finalists", "answer", "decision.json", "best.html"
SCHEMA = "llmopt-decision-1"
_PORT = 8000
_DTYPES = {"bf16": "auto", "f16": "auto"}
_LENGTH_FLAGS = {"llmopt": "--max-model-len", "vllm": "--max-model-len", "llama.cpp": "--ctx-size"}


def recipe_of(target: Target, points: Sequence[Mapping[str, Any]], kv_dtype: str) -> Recipe:
    """The workflow that makes and measures the finalists next to the original. Domains and flips are scored
    if promises are about them: else the answer alone has them."""
    request, work = target.asked, PlanContext.of(target.asked)
    bench: dict[str, Any] = {
        "quality_tokens": request.quality_tokens,
        "quality_full": whole_scores(request.limits) is not None,
        "report": False,
        "seed": request.seed,
    }
    bench |= promised_options(request.limits)
    if request.quality_text is not None:
        bench["quality_text"] = str(request.quality_text.resolve())
    if target.device.kind == "cpu":
        bench["device"] = "cpu"
    if not target.is_here:  # its speed is not that of the target or of its loader
        bench |= {"num_prompts": 1, "max_concurrency": 1, "num_runs": 1, "output_len": 2}
    else:
        bench["num_prompts"] = max(request.num_prompts, request.sequences)
        bench["num_runs"] = 3 if request.slo_limits else 1  # speed without a limit decides nothing
        if request.request_rate is None:
            bench["max_concurrency"] = request.sequences
        else:
            bench["request_rate"] = request.request_rate
        if request.context is not None:
            lengths = {"random_input_len": work.prompt, "random_output_len": work.output}
            bench |= {"dataset": "random", **lengths}
    if kv_dtype not in _DTYPES:
        bench["kv_cache_dtype"] = kv_dtype
    variants = []
    for point in points:
        made = dict(point["quantize"])
        if "stats" in made:  # resumed from any folder
            made["stats"] = str(Path(made["stats"]).resolve())
        variants.append({"name": point["id"], "quantize": made})
    head = {"name": FINALISTS, "model": target.model, "compare": {"gate": False}}
    return Recipe.model_validate({**head, "bench": bench, "variants": variants})


def promised_options(limits: Sequence[Limit]) -> dict[str, Any]:
    """The options of a benchmark that scores the promised depths and tasks."""
    keys = [limit.quantity.key for limit in limits]
    matches = [match for match in map(DEPTH_KEY.fullmatch, keys) if match]
    needles = [key.rpartition(".")[2] for key in keys if key.startswith(f"{PREFIX}needles.")]
    depths = {parse_tokens(depth) for depth in (*needles, *(match["depth"] for match in matches))}
    tasks = [name for name in CHAT_TASKS if any(f"{PREFIX}{name}." in key for key in keys)]
    chosen: dict[str, Any] = {"tasks": tasks} if tasks else {}
    if not depths:
        return chosen
    types = sorted({match["dtype"] for match in matches} - {None})
    depth = {"quality_depth": sorted(depths), "quality_kv": types, "needles": bool(needles)}
    return chosen | depth


def find_best(
    request: BestRequest,
    model: str,
    folder: Path,
    progress: Progress | Callable[[ProgressUpdate], None] | None = None,
    *,
    dry_run: bool = False,
) -> dict[str, Any]:
    """The decision, also in `decision.json` of the folder. Ctrl-C and a spent budget end the work with the
    best so far (`stopped` says which); the same call resumes it. A dry run plans the usual quantizations,
    without a measurement or a file.

    Raises:
        BadInput: there is no such model or GPU, the loader takes nothing of it, the size is impossible, or
            the folder is of another question.
    """
    progress = as_progress(progress)
    target = Target.of(request, model)
    if dry_run:
        return {**_head(target), **plan_usual(target, question_of(target))}
    open_folder(folder, request.question(model, target.device.name))
    budget = request.budget
    if budget is None and target.device.kind == "cpu":
        budget = DEFAULT_BUDGET
    run = _Run(target, folder, BudgetedProgress(progress, budget or math.inf))
    threads = torch.get_num_threads()
    try:
        run.go(threads)
    except KeyboardInterrupt:
        run.stopped = "budget" if run.progress.is_spent else "interrupted"
    finally:
        torch.set_num_threads(threads)
    decision = run.decision()
    write_atomically(folder / DECISION_NAME, json.dumps(decision, indent=1) + "\n")
    if decision["front"]:
        best_page(decision).write(folder / PAGE_NAME)
    return decision


def question_of(target: Target) -> dict[str, Any]:
    """The question as `decision.json` has it."""
    request, device = target.asked, target.device
    return {
        "model": target.model,
        "hardware": {"name": device.name, "kind": device.kind, "count": 1},
        "context": PlanContext.of(request).context,
        "concurrency": None if request.request_rate else request.sequences,
        "request_rate": request.request_rate,
        # Measured speeds of a CPU differ by its noise, which is to decide nothing.
        "is_loaded": (request.sequences > 1 or request.request_rate is not None)
        and device.kind != "cpu",
        "slo": request.slo_limits or None,
        "size_bytes": request.size,
        "target_bpw": request.target_bpw,
        "loads_in": request.loads_in,
        "promises": [
            {
                "metric": limit.quantity.key,
                "op": "<=" if limit.at_most else ">=",
                "limit": limit.bound,
                "relative": limit.relative,
            }
            for limit in request.limits
        ],
        "is_bounded": request.is_bounded,
    }


def _head(target: Target) -> dict[str, Any]:
    return {"llmopt": VERSION, "schema": SCHEMA, "asked": question_of(target)}


class _Run:
    """A search that has an answer whenever it is ended: the first one, then that of its finalists."""

    def __init__(self, target: Target, folder: Path, progress: BudgetedProgress) -> None:
        self.target, self.folder, self.progress = target, folder, progress
        self.question = question_of(target)
        self.searched: dict[str, Any] = {"lanes": [], "front": [], "usual": []}
        self.measured: list[dict[str, Any]] = []
        self.saving = 1.0
        self.stopped: str | None = None

    def go(self, threads: int) -> None:
        """Answer first, search, then make and measure finalists until nothing left is worth it. Finalists are
        solved by so many threads, which benchmarks change: sums depend on it in the last bit."""
        shown = self._step("2 of 4, search", ("",))
        self.searched = search(self.target, self.folder, shown, self._first)
        stages = begin(self.target, self.question, self.searched, self.folder / FINALISTS)
        if stages is None:
            return
        variants = {variant.name: variant for variant in stages.recipe.variants}
        points = points_of(self.searched)
        while True:
            name, self.saving = next_finalist(
                self.question, self.searched, self.measured, [*variants]
            )
            is_found = decide(self.question, self.searched, self.measured)["recommended"]
            if name is None or (is_found and self.saving < self.target.asked.worth):
                break
            nth = f"3 of 4, finalist {len(self.measured) + 1} of at most {len(variants)}"
            # The notes of `quantize` are left to the manifests.
            shown = self._step(nth, ("quantize", "verify", "warning"))
            torch.set_num_threads(threads)
            base, ran = run_variant(stages, variants[name], shown)
            kv_dtype = self.searched["kv_dtype"]
            self.measured.append(
                result_of(self.target, base, ran, points[name], stages.folder, kv_dtype)
            )
            self._say(f"So far: {self.decision()['sentence']}")
        if self.target.asked.quality_full and not stages.recipe.bench.quality_full:
            self._score_answer(stages, self._step("4 of 4, scores of the answer", ("warning",)))
        shutil.rmtree(self.folder / SO_FAR, ignore_errors=True)  # finalists are in its place

    def _score_answer(self, stages: Stages, progress: Progress) -> None:
        """Score the recommended finalist by domain of text and by answers that change."""
        name = decide(self.question, self.searched, self.measured)["recommended"]
        path = self.folder / ANSWER / str(name)
        variant = next((v for v in stages.recipe.variants if v.name == name), None)
        if variant is None:
            return
        if not path.is_dir():
            few = {"num_prompts": 1, "max_concurrency": 1, "num_runs": 1, "quality_full": True}
            options = bench_options(stages, variant).model_copy(update=few)
            run = run_bench(with_reference(options, bench_options(stages, None)), progress)
            if run.interrupted:
                raise KeyboardInterrupt
            write_run(run, path, with_report=False)
        scores = full_scores(RunData.read(path).result["llmopt"]["quality"])
        self.measured = [
            finalist | scores if finalist["id"] == name else finalist for finalist in self.measured
        ]

    def decision(self) -> dict[str, Any]:
        """The decision of what is finished."""
        decision = decide(self.question, self.searched, self.measured)
        if self.stopped is not None and decision["recommended"] is None:
            decision["exit_code"] = UNSURE
            usual = read_first(self.folder)
            if not self.measured and (usual or not decision["front"]):
                decision["sentence"] = first_sentence(self.question, usual, FIRST_TOKENS)
                best = first_best(self.question, usual) or {"name": None}
                for point in decision["usual"]:
                    if point["name"] == best["name"]:
                        point["why"] = ""
        files = [] if self.measured else (self.folder / SO_FAR).glob(f"*/{MANIFEST_NAME}")
        so_far = next((str(path.parent) for path in files), None)
        rest = {"saving": self.saving, "stopped": self.stopped, "so_far": so_far}
        return {**_head(self.target), **decision, **rest}

    def _first(self, kv_dtype: str) -> Sequence[Mapping[str, Any]]:
        shown = self._step("1 of 4, first answer", ("",))
        usual = first_answer(self.target, self.folder, kv_dtype, shown)
        self._say(first_sentence(self.question, usual, FIRST_TOKENS))
        make_first(self.target, self.question, usual, self.folder)
        return usual

    def _say(self, answer: str) -> None:
        self.progress.note(f"{answer} ({in_words(self.progress.elapsed)} after the start)")

    def _step(self, name: str, notes: tuple[str, ...]) -> Progress:
        return SubRun(self.progress, lambda: f"step {name}", notes)


def begin(
    target: Target,
    question: Mapping[str, Any],
    searched: Mapping[str, Any],
    folder: Path,
) -> Stages | None:
    """The recipe of the finalists, begun or resumed; None if no point may keep the promises."""
    if Stages.is_at(folder):
        return Stages.resume(folder)
    points, chosen = points_of(searched), choose(question, searched, target.asked.finalists)
    if not chosen:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    recipe = recipe_of(target, [points[name] for name in chosen], searched["kv_dtype"])
    return Stages.begin(folder, recipe)


def result_of(
    target: Target,
    original: RunData,
    run: VariantRun,
    point: Mapping[str, Any],
    folder: Path,
    kv_dtype: str,
) -> dict[str, Any]:
    """A finalist's results for JSON, with the verdicts on the limits on quality; its speed is measured if
    this machine is the target and llmopt the loader, else as the point was planned."""
    name, result = run.variant.name, run.data.result
    checkpoint, quality = folder / "checkpoints" / name, result["llmopt"]["quality"]
    limits = target.asked.limits
    verdicts = zip(limits, check_promises(limits, quality, (original, run.data)), strict=True)
    return plain(
        {
            "id": name,
            "folder": str(checkpoint),
            "rebuild": rebuild_words(target, name, point["quantize"]),
            "serve": serve_words(target, checkpoint, name, kv_dtype),
            "kl": interval(quality, "kl_nats"),
            "top1": interval(quality, "top1_agreement"),
            **full_scores(quality),
            "bytes": find_model(str(checkpoint)).stored_bytes,
            "speed": measured_speed(result) if target.is_here else point["speed"],
            "sound": run.is_sound,
            "verdicts": [judged(limit, verdict) for limit, verdict in verdicts],
        }
    )


def full_scores(quality: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of `--quality-full`, for JSON."""
    domains = {domain: interval(quality, f"domains.{domain}.kl_nats") for domain in DOMAINS}
    return {
        "flips": interval(quality, "flips.share"),
        "kl_by_domain": {domain: kl for domain, kl in domains.items() if kl is not None},
    }


def interval(quality: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """A score with its interval, with None for edges if the text is too short for one; None without a
    score."""
    if (score := score_of(quality, path)) is None:
        return None
    low, high = score[1] or (None, None)
    return {"value": score[0], "low": low, "high": high}


def measured_speed(result: Mapping[str, Any]) -> dict[str, Any]:
    """Mean times of a run in milliseconds, with the intervals of their means."""
    metrics = result["llmopt"]["metrics"]

    def band(metric: str) -> Any:
        return ((metrics.get(metric) or {}).get("interval_95") or {}).get("mean")

    times = {f"{name}_ms": result[f"mean_{name}_ms"] for name in ("tpot", "ttft", "e2el")}
    return {
        **times,
        "tokens_per_s": result["output_throughput"],
        "band": band("tpot"),
        "ttft_band": band("ttft"),
        "source": "measured",
    }


def judged(limit: Limit, verdict: LimitVerdict) -> dict[str, Any]:
    """A verdict for JSON: its outcome, a short sentence, and the excess of the value over its limit as a
    share of the limit, negative within."""
    value = verdict.new
    if value is None:
        return {"outcome": verdict.outcome.value, "reason": verdict.reason, "excess": 0.0}
    sign, unit = (1, ">") if limit.at_most else (-1, "<")
    edges = [value if edge is None else edge for edge in verdict.interval or ()]
    between = f" ({edges[0]:.3g} to {edges[1]:.3g})" if edges and edges[0] != edges[1] else ""
    change = "change of " if limit.relative else ""
    text = f"{change}{limit.quantity.key} {value:.3g}{between}"
    if verdict.outcome is GateOutcome.NO_VERDICT:  # how much more text or items would tell
        text += f": {verdict.reason.rpartition(': ')[2]}"
    else:
        text += f" {unit} {limit.bound:g}"
    excess = sign * (value - limit.bound) / (abs(limit.bound) or 1.0)
    return {"outcome": verdict.outcome.value, "reason": text, "excess": excess}


def rebuild_words(target: Target, name: str, made: Mapping[str, Any]) -> str:
    """The command that makes a finalist again."""
    step = dict(made)
    step["target_bytes"] = step.pop("target_size", None)
    step["candidates"] = ",".join(step.get("candidates", ())) or None
    arguments = words_of(QuantizeRequest, step) | words_of(MethodOptions, step)
    return shlex.join(
        ["llmopt", "quantize", target.model, *server_words(arguments), "--output", name]
    )


def serve_words(target: Target, checkpoint: Path, name: str, kv_dtype: str) -> str:
    """The command that serves a finalist by its loader."""
    request, loader = target.asked, preset(target.asked.loads_in)
    path = str(gguf_file_of(checkpoint) or checkpoint)
    arguments = loader.arguments(path, f"{short_name(target.path)}-{name}", _PORT)
    if request.loads_in == "llmopt":
        arguments = ["llmopt", *arguments[2:]]
    else:
        arguments = [str(loader.program), *arguments]
    if kv_dtype == "fp8":
        arguments += ["--kv-cache-dtype", kv_dtype]
    if request.context is not None and (flag := _LENGTH_FLAGS.get(request.loads_in)) is not None:
        tokens = PlanContext.of(request).context
        arguments += [
            flag,
            str(tokens * (request.sequences if request.loads_in == "llama.cpp" else 1)),
        ]
    return shlex.join(arguments)
