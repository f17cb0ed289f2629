"""The first answer of `best`, and the budget that ends the work after it.

The usual quantizations are judged minutes after the start, before anything is searched: all are rounded to
nearest and walk through the layers next to the original, on a short text. No file is written, so that no
promise is proven; the search and its finalists replace the answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base.atomic_io import write_atomically
from ...base.progress import Progress
from ...engine.base.units import format_gib
from ...quant.model.checkpoint import read_json
from ...quant.pipeline.pipeline import quantize
from ...quant.pipeline.prepare import rounding_losses
from ...quant.plan.request import QuantizeRequest
from ..quality.summary import PositionBlocks
from .decision import check_first, check_point, fastest_by_load, rank
from .search import ORIGINAL, USUAL, Target, config_point, kv_dtype_of, usual_point

FIRST_NAME, SO_FAR = "first.json", "so-far"
FIRST_TOKENS = 1024
"""Held-out tokens of the first answer: a minute of processor time for SmolLM2-135M and five formats."""


class BudgetSpent(KeyboardInterrupt):
    """The time is spent: what is finished is kept, as after Ctrl-C."""


class BudgetedProgress:
    """Progress that ends the work at the first report after `seconds`: within a long step too.

    A step that is ended so is done anew by the next run, so that an end changes no measurement.
    """

    def __init__(
        self, inner: Progress, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner, self._clock, self._begun, self._seconds = inner, clock, clock(), seconds
        self.note, self.status, self.finish = inner.note, inner.status, inner.finish

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begun

    @property
    def is_spent(self) -> bool:
        return self.elapsed > self._seconds

    def start(self, description: str, total: int, unit: str) -> None:
        self._check()
        self._inner.start(description, total, unit)

    def advance(self, count: float = 1) -> None:
        self._inner.advance(count)
        self._check()

    def _check(self) -> None:
        if self.is_spent:
            raise BudgetSpent


def first_answer(
    target: Target, folder: Path, kv_dtype: str, progress: Progress
) -> list[dict[str, Any]]:
    """The usual quantizations; those that the loader takes with `first_kl`, their mean KL divergence with its
    interval after rounding to nearest. The folder keeps each as it is measured."""
    path = folder / FIRST_NAME
    usual = read_first(folder) or [usual_point(target, name, kv_dtype) for name in USUAL]
    left = [p for p in usual if p["refused"] is None and "first_kl" not in p]
    requests = [QuantizeRequest.of(target.model, Path(), **p["quantize"]) for p in left]
    if not requests:
        return usual
    for number, loss in rounding_losses(requests, FIRST_TOKENS, progress):
        sample = np.repeat(np.arange(len(loss)), loss.shape[1])
        values = loss.flatten().numpy()
        low, high = PositionBlocks.over(sample, sample, target.asked.seed).mean(values)
        left[number]["first_kl"] = {"value": float(values.mean()), "low": low, "high": high}
        write_atomically(path, json.dumps({"usual": usual}, indent=1) + "\n")
    return usual


def first_best(
    request: Mapping[str, Any], usual: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The best of the usual quantizations that may keep the promises after rounding to nearest."""
    checked = [check_first(request, point) for point in usual if point.get("first_kl")]
    by_kl = request["is_bounded"]
    return min(
        (point for point in checked if point["keeps"] is not False),
        key=lambda p: (p["first_kl"]["value"] if by_kl else 0.0, *rank(request, p)),
        default=None,
    )


def first_sentence(
    request: Mapping[str, Any], usual: Sequence[Mapping[str, Any]], tokens: int
) -> str:
    """The best of the usual quantizations by their KL divergences on a short text, rounded to nearest."""
    checked = [check_first(request, point) for point in usual if point.get("first_kl")]
    if not checked:
        return "So far: no usual quantization is measured."
    best = first_best(request, usual)
    if best is None:
        near = min(checked, key=lambda point: (point["excess"], point["bytes"]))
        return (
            f"So far: none of the usual quantizations keeps the promises when rounded to nearest; "
            f"{near['id']} comes closest: {'; '.join(near['breaks'])}."
        )
    kl = best["first_kl"]
    sure = "is expected to keep" if best["keeps"] else "may keep"
    return (
        f"So far: {best['id']} ({best['bits_per_weight']:.2f} bits per weight, "
        f"{format_gib(best['bytes'])}) {sure} the promises: KL {kl['value']:.3g} ({kl['low']:.3g} to "
        f"{kl['high']:.3g}) on {tokens:,} tokens, rounded to nearest and not verified. More time searches "
        "mixtures of fewer bytes, then makes and measures the nearest."
    )


def make_first(
    target: Target, question: Mapping[str, Any], usual: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Make the checkpoint of the best usual quantization that no solver makes and that may keep the promises:
    a search that is ended leaves it. Its weights are those whose KL divergence was measured."""
    rounded = {point["id"]: point for point in usual if not point.get("is_solved", True)}
    best = first_best(question, [*rounded.values()])
    if best is None or (output := folder / SO_FAR / best["id"]).exists():
        return
    output.parent.mkdir(exist_ok=True)
    made = rounded[best["id"]]["quantize"]
    quantize(QuantizeRequest.of(target.model, output, **made, errors=False))


def read_first(folder: Path) -> list[dict[str, Any]]:
    path = folder / FIRST_NAME
    return read_json(path)["usual"] if path.is_file() else []


def plan_usual(target: Target, question: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes, fit and speed of the original and the usual quantizations, and the fastest by load, by headers,
    or by `config.json` alone: `is_checked` is True if headers told what the loader takes."""
    kv_dtype = kv_dtype_of(target)
    has_weights = target.path.is_file() or any(target.path.glob("*.safetensors"))
    planned = []
    for name in (ORIGINAL, *USUAL):
        is_checked = has_weights and name in USUAL
        point = (usual_point if is_checked else config_point)(target, name, kv_dtype)
        if point["refused"] is None:
            planned.append(check_point(question, point, None))
        else:
            planned.append(point | {"keeps": False, "breaks": [point["refused"]]})
    speeds = {p["id"]: p["throughput"] for p in planned if p.get("throughput")}
    by_load = fastest_by_load(speeds)
    return {"planned": planned, "by_load": by_load, "is_checked": has_weights}
