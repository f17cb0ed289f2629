"""The time of a run on this machine: one layer is quantized on little text, timed, and thrown away.

A layer's time has a part that grows with the calibration tokens, the passes of the layer over them, and a
part that does not: choosing the codes, and packing them. Both grow with the layer's weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from ...base.progress import Progress
from ..plan.plan import QuantizePlan
from ..stream.sources import CPU_SAMPLES, CPU_SEQ_LEN
from .online_calibration import NoCalibration, OnlineCalibration, Tuning
from .quantized_layer import quantize_tensors
from .stages import Session

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
# Tokens of the timed layer: few for a large one, so that its passes take seconds.
_LEAST_TOKENS, _MOST_TOKENS, _WEIGHTS_TIMES_TOKENS = 512, 16_384, 60e9
_HELD_OUT = 8  # calibration samples for each held-out one, as by default


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer: choosing and packing codes, and passes over `tokens`, held-out ones included."""

    solving: float
    passes: float
    tokens: int
    weights: int

    def seconds(self, weights: int, tokens: float, solvers: int = 1) -> float:
        """The time of a run over so many weights, with so many tokens a worker, and choices by `solvers`."""
        per_layer = self.solving / solvers + self.passes * tokens / max(1, self.tokens)
        return per_layer * weights / self.weights


def weights_of(plan: QuantizePlan, prefix: str = "") -> int:
    """Weights of the quantized linears whose names begin so."""
    return sum(
        out * width for name, (out, width) in plan.modules.items() if name.startswith(prefix)
    )


def quick_tokens() -> int:
    return (CPU_SAMPLES + CPU_SAMPLES // _HELD_OUT) * CPU_SEQ_LEN


def time_layer(session: Session, progress: Progress) -> LayerTime | None:
    """Quantize the first layer on little text; None where images would be cut, or nothing is quantized."""
    plan, stream, calibration = session.plan, session.stream, session.calibration
    prefix = f"{stream.prefix(0)}."
    weights = weights_of(plan, prefix)
    if calibration.num_images or not weights:
        return None
    progress.start("timing one layer", 0, "")
    # A few samples, cut where one alone is too long.
    most = int(min(_MOST_TOKENS, max(_LEAST_TOKENS, _WEIGHTS_TIMES_TOKENS / weights)))
    samples, length = calibration.token_ids.shape
    length = min(length, most)
    count = min(samples, max(1, most // max(1, length)))
    text = replace(
        calibration,
        token_ids=calibration.token_ids[:count, :length],
        held_out=calibration.held_out[: -(-count // _HELD_OUT), :length],
    )
    source = NoCalibration()
    if session.request.errors:
        source = OnlineCalibration(
            stream,
            text,
            None,
            sequential=plan.sequential and session.statistics is None,
            kv=plan.kv_cache is not None,
            asymmetric=bool(plan.options.asymmetric),
            tuning=Tuning(session.request.seed, progress.status) if plan.blockwise else None,
        )
    seconds = [0.0]  # within passes, those that the method makes itself included

    def timed(call: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                seconds[0] += time.perf_counter() - began

        return run

    began = time.perf_counter()
    tensors = stream.tensors(0)
    measured = timed(source.measure)(0, tensors)
    if measured.remeasure is not None:
        measured = replace(measured, remeasure=timed(measured.remeasure))
    work = quantize_tensors(
        plan,
        stream.family(0),
        stream.prefix(0),
        tensors,
        source.weights(0, stream.family(0).linears),
        measured,
        revert_worse=session.request.revert_worse,
        allow_fallback=session.request.allow_fallback,
    )
    timed(source.finish)(0, work)
    for weight_format in plan.formats:
        work.packed(plan, weight_format)
    whole = time.perf_counter() - began
    plan.checkpoint.release()
    progress.finish()
    return LayerTime(whole - seconds[0], seconds[0], text.num_tokens, weights)
