"""The question of `llmopt best`: a model, hardware with its load, promises, and what must load the answer.

The load is a closed loop of `--concurrency` clients, or requests that arrive at random at `--request-rate`.
With `--ctx` every request takes that many tokens, with `--output-len` of them generated; else the lengths are
those of the bundled conversations, which finalists are also measured with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ...base.atomic_io import make_folder, write_atomically
from ...base.errors import BadInput
from ...base.option import check_limits, offer, option, option_like, options_of, within
from ...engine.base.units import parse_size, parse_tokens, required_slo
from ...engine.config.plan_options import PlanRequest
from ...engine.planner.devices import Device, choose_devices
from ...quant.model.checkpoint import read_json
from ...quant.plan.request import QuantizeRequest
from ..gate.limits import SCORED, Limit, Scored, parse_promises, parse_share
from ..options.definitions import QualityOptions
from ..options.values import parse_duration, parse_nats

DEFAULT_BUDGET = 30 * 60
"""Seconds of a search on a CPU; on a GPU the search ends by itself."""
DEFAULT_MAX_KL = 0.05
"""Nats per token that are promised without a size and any promise."""
QUESTION_NAME, STATISTICS, DATASET = "question.json", "statistics", "sharegpt"
LOADERS = ("llmopt", "vllm", "transformers", "llama.cpp")
SHARED = ("calibration", "num_samples", "seq_len", "held_out", "evaluation", "seed", "device")
"""Options that every finalist is quantized with, as `quantize` has them."""
_FREE = ("stats", "budget", "worth")  # a resumed search may have others
_LOAD, _PROMISE, _SEARCH, _DATA = "Hardware and load", "Promise", "Search", "Calibration data"
_calibrated = partial(option_like, QuantizeRequest, panel=_DATA, common=False)


def _duration(text: str) -> float:
    if text.strip()[-1:].isdecimal():
        raise BadInput(f"--budget {text}: give a unit, such as {text.strip()}m")
    try:
        return parse_duration(text)
    except ValueError as error:
        raise BadInput(f"--budget {text}: {error}") from error


def _worth(text: str) -> float:
    try:
        return parse_share(text)
    except BadInput as error:
        raise BadInput(f"--worth {text}: give a share such as 2%") from error


def device_of(name: str) -> Device:
    """The GPU of that name, or this machine's processor. Raises BadInput: it names none, or several."""
    device, *others = choose_devices([name], None)
    if others:
        raise BadInput(f"--gpu {name}: name one, or cpu")
    return device


def _gpu_name(name: str) -> str:
    device_of(name)  # refused before any work
    return name


@dataclass(frozen=True, slots=True)
class BestRequest:
    """The question, as the command line has it."""

    PANEL: ClassVar = _PROMISE

    gpu: str | None = option(
        None,
        "A GPU of kv-plan's table (kv-plan --list), or cpu. Default: this machine.",
        word=str,
        parse=_gpu_name,
        panel=_LOAD,
        common=True,
    )
    context: str | None = option_like(
        PlanRequest,
        "context",
        help="Tokens per sequence: 4096, 32k. Default: bundled conversations.",
        panel=_LOAD,
    )
    sequences: int = option_like(
        PlanRequest, "sequences", flag="--concurrency", panel=_LOAD, limit=within(ge=1)
    )
    request_rate: float | None = option_like(
        PlanRequest,
        "request_rate",
        help="Requests per second that arrive at random, in place of --concurrency.",
        panel=_LOAD,
        limit=within(gt=0, finite=True),
    )
    output_tokens: int | None = option_like(
        PlanRequest, "output_tokens", flag="--output-len", panel=_LOAD, common=False
    )
    loads_in: str = option(
        "llmopt",
        f"What must load it: {', '.join(LOADERS)}.",
        word=str,
        parse=str.lower,
        panel=_LOAD,
        common=True,
    )
    size: int | None = option(
        None,
        "Maximum size of all tensors: 6GiB.",
        word=str,
        parse=parse_size,
        limit=within(ge=1),
        common=True,
    )
    target_bpw: float | None = option_like(
        QuantizeRequest,
        "target_bpw",
        help="Maximum bits per quantized weight, in place of --size.",
        panel=None,
        limit=within(gt=0, finite=True),
    )
    slo: str | None = option(
        None,
        'Limits on mean latencies under that load, in ms without a unit: "tpot:20 ttft:1s".',
        common=True,
    )
    max_kl: float | None = option(
        None,
        "Maximum mean KL divergence from the original, in nats a token. Default: "
        f"{DEFAULT_MAX_KL:g} where neither a size nor another promise is given.",
        metavar="FLOAT",
        word=str,
        parse=parse_nats,
        limit=within(ge=0, finite=True),
        common=True,
    )
    promise: tuple[str, ...] = option(
        (),
        "Limits on scores against the original: 'flips<=2%', 'kl.code<=0.02', 'top1>=95%'; repeatable.",
        word=list[str],
        parse=tuple,
        common=True,
    )
    finalists: int = option(
        10,
        "Checkpoints that are made and measured, at most.",
        limit=within(ge=1, le=10),
        common=True,
    )
    budget: float | None = option(
        None,
        "Time after which the best so far is the answer: 2h. The same command goes on from there. Default: "
        f"{DEFAULT_BUDGET // 60}m on a CPU.",
        word=str,
        parse=_duration,
        panel=_SEARCH,
        common=True,
    )
    worth: float = option(
        0.02,
        "The search ends when nothing left may save this share of the bytes, or of the KL divergence with a "
        "size.",
        word=str,
        parse=_worth,
        metavar="SHARE",
        limit=within(ge=0, lt=1),
        panel=_SEARCH,
        common=True,
    )
    formats: tuple[str, ...] = option(
        (),
        "File formats to search: compressed-tensors, gguf, exl3. Default: all that the loader takes.",
        flag="--format",
        word=list[str],
        parse=tuple,
        panel=_SEARCH,
        common=True,
    )
    candidates: tuple[str, ...] = option_like(
        QuantizeRequest,
        "candidates",
        help="Kinds of weights, as quantize --candidates has them. Default: those that the loader takes.",
        panel=_SEARCH,
        common=False,
    )
    stats: Path | None = option_like(
        QuantizeRequest,
        "stats",
        help="Folder of statistics that other searches share. Default: one in the output.",
        panel=_SEARCH,
    )
    num_prompts: int = option(
        16,
        "Requests that each finalist is measured with, where this machine is the target and llmopt loads it.",
        limit=within(ge=1),
        panel=_SEARCH,
    )
    quality_tokens: int = option_like(QualityOptions, "quality_tokens", panel=_SEARCH)
    quality_text: Path | None = option_like(
        QualityOptions,
        "quality_text",
        help="Text that finalists are scored on. Default: bundled stories.",
        panel=_SEARCH,
    )
    quality_full: bool = option(
        True, "Score finalists by domain of text and by answers that change too.", panel=_SEARCH
    )
    calibration: str | None = _calibrated("calibration")
    num_samples: int | None = _calibrated("num_samples")
    seq_len: int | None = _calibrated("seq_len")
    held_out: int | None = _calibrated("held_out")
    evaluation: str | None = _calibrated("evaluation")
    seed: int = _calibrated("seed")
    device: str = _calibrated("device")

    def __post_init__(self) -> None:
        check_limits(self, by_flag=True)
        if self.size is not None and self.target_bpw is not None:
            raise BadInput("--size and --target-bpw bound the same bytes: give one")
        if self.loads_in not in LOADERS:
            raise BadInput(f"--loads-in {self.loads_in}: {offer(self.loads_in, LOADERS)}")
        if self.request_rate is not None and self.sequences != 1:
            raise BadInput("--concurrency and --request-rate are both the load: give one")
        if self.output_tokens is not None and self.context is None:
            raise BadInput("--output-len is a part of the context: give --ctx too")
        if self.quality_text is not None and not self.quality_text.is_file():
            raise BadInput(f"--quality-text {self.quality_text}: there is no such file")
        _ = self.limits, self.slo_limits

    @property
    def is_bounded(self) -> bool:
        """True if bytes are bounded: then the least KL divergence within them is searched, else the fewest
        bytes that keep the promises."""
        return self.size is not None or self.target_bpw is not None

    @property
    def slo_limits(self) -> dict[str, float]:
        """{ttft, tpot or e2el: milliseconds}."""
        return {} if self.slo is None else required_slo(self.slo)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits on quality. Raises BadInput: a limit that no finalist could be held to."""
        try:
            promises = parse_promises(" ".join(self.promise)) if self.promise else ()
        except BadInput as error:
            reason = str(error).removeprefix("gate: ").removeprefix("promise: ")
            raise BadInput(f"--promise {reason}") from error
        if not self.quality_full and (key := whole_scores(promises)):
            raise BadInput(f"--promise {key}: --no-quality-full leaves it out: give one of them")
        most = self.max_kl
        if most is None and not (promises or self.is_bounded):
            most = DEFAULT_MAX_KL
        if most is not None and any(limit.quantity.key == "kl" for limit in promises):
            raise BadInput("--max-kl and --promise kl bound the same: give one")
        return (*promises, *([] if most is None else [Limit(SCORED["kl"], True, most, False)]))

    @property
    def shared(self) -> dict[str, Any]:
        """The options that every finalist is quantized with, and that are not the default."""
        fields = QuantizeRequest.__dataclass_fields__
        given = {name: getattr(self, name) for name in SHARED}
        return {name: value for name, value in given.items() if value != fields[name].default}

    def question(self, model: str, hardware: str) -> dict[str, Any]:
        """Everything that the answer depends on, for JSON: a folder holds the answer to one question."""
        names = [name for name in options_of(BestRequest) if name not in _FREE]
        values = {name: getattr(self, name) for name in names}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        text = None if self.quality_text is None else str(self.quality_text.resolve())
        return {"model": model, **values, **lists, "quality_text": text, "gpu": hardware}


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Tokens of a request: all tokens of the longest one, and of the mean prompt and answer."""

    context: int
    prompt: int
    output: int

    @classmethod
    def of(cls, request: BestRequest) -> PlanContext:
        from ...engine.planner.load import dataset_lengths
        from ...engine.planner.setup import PlannedWorkload

        if request.context is not None:
            work = PlannedWorkload(
                parse_tokens(request.context), output_tokens=request.output_tokens
            )
            return cls(work.context, work.prompt_tokens, work.answer_tokens)
        lengths = dataset_lengths(DATASET)
        prompts, outputs = zip(*lengths, strict=True)
        count = len(lengths)
        return cls(max(map(sum, lengths)), sum(prompts) // count, sum(outputs) // count)


def whole_scores(limits: Sequence[Limit]) -> str | None:
    """The first of the limits that `--quality-full` alone scores, by its key."""
    scored = (limit.quantity for limit in limits if isinstance(limit.quantity, Scored))
    return next((what.key for what in scored if what.option == "--quality-full"), None)


def open_folder(folder: Path, question: dict[str, Any]) -> None:
    """Make the folder of a question, or resume it. Raises BadInput: the folder holds something else, or the
    answer to another question."""
    path = folder / QUESTION_NAME
    kept = [entry for entry in folder.iterdir() if entry != path] if folder.is_dir() else []
    if path.is_file() and kept:  # a question that was refused leaves nothing else
        request = read_json(path)
        others = [name for name in question if request.get(name) != question[name]]
        if others:
            name = others[0]
            raise BadInput(
                f"--output {folder} is of another question, with {name.replace('_', '-')} "
                f"{request.get(name)}, not {question[name]}: name another folder, for which --stats "
                f"{folder / STATISTICS} saves the measuring"
            )
        return
    if kept or (folder.exists() and not folder.is_dir()):
        raise BadInput(f"--output {folder} holds other files: name another folder")
    make_folder(folder, "--output")
    write_atomically(path, json.dumps(question, indent=2) + "\n")


def local_gpu() -> str | None:
    """Name of this machine's first GPU, if torch can use it."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
