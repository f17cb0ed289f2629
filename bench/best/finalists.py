"""Finalists: made, verified and measured by the recipe runner, which resumes them; the way to a decision."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.atomic_io import write_atomically
from ...base.option import words_of
from ...base.progress import Progress, ProgressUpdate, SubRun, as_progress, in_words
from ...base.version import VERSION
from ...engine.base.units import parse_tokens
from ...engine.planner.catalog import find_model
from ...quant.model.checkpoint import gguf_file_of
from ...quant.pipeline.estimate import time_layer
from ...quant.pipeline.preflight import preflight
from ...quant.pipeline.prepare import prepare
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
from ..studies.jobs import jobs_of
from ..studies.recipe import Recipe, server_words
from ..studies.recipe_files import Stages, VariantRun
from ..studies.recipe_run import run_recipe
from .best_page import best_page
from .decision import choose, decide
from .search import PlanContext, Target, search
from .target import BestRequest, open_folder

FINALISTS, DECISION_NAME, PAGE_NAME = "finalists", "decision.json", "best.html"
SCHEMA = "llmopt-decision-1"
_PORT = 8000
_DTYPES = {"bf16": "auto", "f16": "auto"}
_LENGTH_FLAGS = {"llmopt": "--max-model-len", "vllm": "--max-model-len", "llama.cpp": "--ctx-size"}


def affordable(
    target: Target, points: Sequence[Mapping[str, Any]], count: int, progress: Progress
) -> int:
    """The number of finalists, at least 1 and at most `count`, that the budget has time for, by the estimate
    of quantizing one. Scoring takes about as long again: the original and the finalist compute each token
    once."""
    budget = target.asked.budget
    if budget is None or not points:
        return count
    step = {"name": "one", "quantize": dict(points[-1]["quantize"])}
    quantize = Recipe.model_validate({"name": "one", "variants": [step]}).variants[0].quantize
    assert quantize is not None
    session = prepare(quantize.request(target.path, Path(), target.model), progress)
    seconds = 2 * preflight(session, layer=time_layer(session, progress)).seconds
    number = max(1, min(count, int(budget / seconds)))
    progress.note(
        f"about {in_words(seconds)} for each finalist: {number} of at most {count} are made"
    )
    return number


def recipe_of(target: Target, points: Sequence[Mapping[str, Any]], kv_dtype: str) -> Recipe:
    """The workflow that makes and measures the finalists next to the original."""
    request, work = target.asked, PlanContext.of(target.asked)
    bench: dict[str, Any] = {
        "quality_tokens": request.quality_tokens,
        "quality_full": request.quality_full,
        "report": False,
        "seed": request.seed,
    }
    bench |= promised_options(request.limits)
    if target.device.kind == "cpu":
        bench["device"] = "cpu"
    if not target.is_here:  # its speed is not that of the target or of its loader
        bench |= {"num_prompts": 1, "max_concurrency": 1, "num_runs": 1, "output_len": 2}
    else:
        num_prompts = max(request.num_prompts, request.sequences)
        bench |= {"num_prompts": num_prompts, "max_concurrency": request.sequences, "num_runs": 3}
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
    on_ray: bool = False,
    score_shares: int = 1,
) -> dict[str, Any]:
    """The decision, also in `decision.json` of the folder; the same call resumes an interrupted one. A dry
    run only searches, marks the planned finalists and writes no decision. With `on_ray` Ray makes, scores and
    measures them; `score_shares` jobs share the scoring of a finalist.

    Raises:
        BadInput: there is no such model or GPU, the loader takes nothing of it, the size is impossible, or
            the folder is of another question.
        KeyboardInterrupt: interrupted; finished work is kept.
    """
    progress = as_progress(progress)
    target = Target.of(request, model)
    open_folder(folder, request.question(model, target.device.name))
    searched = search(target, folder, progress)
    question = {
        "model": model,
        "hardware": searched["hardware"],
        "context": searched["context"],
        "concurrency": request.sequences,
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
    head = {"llmopt": VERSION, "schema": SCHEMA, "asked": question}
    if dry_run:
        decision = decide(question, searched, [])
        chosen = choose(question, searched, request.finalists)
        front = [point | {"finalist": point["id"] in chosen} for point in decision["front"]]
        pairs = zip(decision["usual"], searched["usual"], strict=True)
        usual = [shown for shown, point in pairs if point["id"] not in chosen]
        return {**head, **decision, "front": front, "usual": usual}
    stages = begin(target, question, searched, folder / FINALISTS, progress, score_shares)
    measured = results(target, stages, searched, progress, on_ray=on_ray)
    decision = {**head, **decide(question, searched, measured)}
    write_atomically(folder / DECISION_NAME, json.dumps(decision, indent=1) + "\n")
    best_page(decision).write(folder / PAGE_NAME)
    return decision


def begin(
    target: Target,
    question: Mapping[str, Any],
    searched: Mapping[str, Any],
    folder: Path,
    progress: Progress,
    score_shares: int = 1,
) -> Stages | None:
    """The recipe of the finalists, begun or resumed; None if no point may keep the promises."""
    if Stages.is_at(folder):
        return Stages.resume(folder)
    chosen = choose(question, searched, target.asked.finalists)
    points = _points(searched)
    most = affordable(target, [points[name] for name in chosen], len(chosen), progress)
    if most < len(chosen):
        chosen = choose(question, searched, most)
    if not chosen:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    recipe = recipe_of(target, [points[name] for name in chosen], searched["kv_dtype"])
    return Stages.begin(folder, recipe, score_shares)


def results(
    target: Target,
    stages: Stages | None,
    searched: Mapping[str, Any],
    progress: Progress,
    *,
    on_ray: bool = False,
) -> list[dict[str, Any]]:
    """The results of the finalists, which are made and measured unless they were before."""
    if stages is None:
        return []
    points = _points(searched)
    # The notes of `quantize` are left to the manifests.
    shown = SubRun(progress, lambda: _step_of(stages), ("quantize", "verify", "warning"))
    ran = run_recipe(stages, shown, on_ray=on_ray)
    return [
        result_of(
            target, ran.base, run, points[run.variant.name], stages.folder, searched["kv_dtype"]
        )
        for run in ran.variants
    ]


def _step_of(stages: Stages) -> str:
    steps = len(jobs_of(stages))
    return f"step {min(stages.num_done + 1, steps)} of {steps}"


def _points(searched: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {point["id"]: point for point in (*searched["front"], *searched["usual"])}


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
    domains = {domain: interval(quality, f"domains.{domain}.kl_nats") for domain in DOMAINS}
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
            "flips": interval(quality, "flips.share"),
            "kl_by_domain": {domain: kl for domain, kl in domains.items() if kl is not None},
            "bytes": find_model(str(checkpoint)).stored_bytes,
            "speed": measured_speed(result) if target.is_here else point["speed"],
            "sound": run.is_sound,
            "verdicts": [judged(limit, verdict) for limit, verdict in verdicts],
        }
    )


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
    arguments = words_of(QuantizeRequest, step)
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
