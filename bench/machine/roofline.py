"""Roofline analysis of a run: intensity, MBU and MFU per phase, and the limiting resource."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.planner.speed import (
    attainable_flops,
    decode_step_bytes,
    decode_step_flops,
    prefill_flops,
    ridge,
    streamed_weight_bytes,
)
from ...quant.base.errors import BadInput
from ...quant.families.shapes import ModelShape
from ...quant.models import open_checkpoint
from ..metrics.trace import LoadPass, StepRecord
from .ceilings import Ceilings, measure_ceilings

if TYPE_CHECKING:
    from ...engine.engine import Engine

FORMULAS = {
    "bytes_per_step": "weights streamed once + KV cache of every running sequence (model bytes, not "
    "counters)",
    "mbu": "model bytes of the decode steps / their time / measured bandwidth",
    "mfu": "model FLOP / time / measured matmul peak; a multiply-add counts as two",
    "intensity": "model FLOP / model bytes",
    "of_roof": "achieved FLOP/s / min(peak, intensity · bandwidth)",
}
# Below this fraction of both ceilings, neither memory nor arithmetic is the bottleneck.
OVERHEAD_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PhasePoint:
    """One phase of a run as a point of the roofline; rates are per second of its steps."""

    phase: str
    num_steps: int
    seconds: float
    bytes_per_step: float
    flops_per_step: float
    intensity: float
    achieved_flops: float
    achieved_bandwidth: float
    mbu: float
    mfu: float
    of_roof: float
    bound: str


@dataclass(frozen=True, slots=True)
class ByteSizes:
    """Bytes that a step moves: of all weights, of an element of the KV cache, of an unquantized weight."""

    weight_bytes: float
    kv_bytes_per_element: float
    unquantized_bytes: float


def decode_point(
    steps: Sequence[StepRecord],
    shape: ModelShape,
    ceilings: Ceilings,
    sizes: ByteSizes,
) -> PhasePoint | None:
    """The decode-only steps; None if there were none."""
    chosen = [step for step in steps if step.decode_only]
    moved = computed = 0.0
    for step in chosen:
        batch, context = step.num_sequences, step.context_tokens / step.num_sequences
        moved += decode_step_bytes(
            shape,
            batch,
            context,
            sizes.weight_bytes,
            sizes.kv_bytes_per_element,
            sizes.unquantized_bytes,
        )
        computed += decode_step_flops(shape, batch, context)
    return _point("decode", chosen, moved, computed, ceilings)


def prefill_point(
    steps: Sequence[StepRecord],
    shape: ModelShape,
    ceilings: Ceilings,
    sizes: ByteSizes,
) -> PhasePoint | None:
    """All other steps (prefill and mixed); decode tokens in mixed steps are included."""
    chosen = [step for step in steps if not step.decode_only and step.computed_tokens]
    moved = computed = 0.0
    for step in chosen:
        tokens = step.computed_tokens
        prompts = max(1, step.num_first)
        moved += streamed_weight_bytes(shape, sizes.weight_bytes, tokens, sizes.unquantized_bytes)
        moved += tokens * shape.kv_bytes_per_token(sizes.kv_bytes_per_element)
        computed += prompts * prefill_flops(shape, max(1, tokens // prompts))
    return _point("prefill", chosen, moved, computed, ceilings)


def _point(
    phase: str, steps: Sequence[StepRecord], moved: float, computed: float, ceilings: Ceilings
) -> PhasePoint | None:
    seconds = sum(step.seconds for step in steps)
    if not steps or seconds <= 0:
        return None
    intensity = computed / moved
    achieved = computed / seconds
    mbu = moved / seconds / ceilings.bandwidth
    mfu = achieved / ceilings.flops
    return PhasePoint(
        phase=phase,
        num_steps=len(steps),
        seconds=seconds,
        bytes_per_step=moved / len(steps),
        flops_per_step=computed / len(steps),
        intensity=intensity,
        achieved_flops=achieved,
        achieved_bandwidth=moved / seconds,
        mbu=mbu,
        mfu=mfu,
        of_roof=achieved / attainable_flops(intensity, ceilings.flops, ceilings.bandwidth),
        bound=name_bound(intensity, mbu, mfu, ceilings),
    )


def name_bound(intensity: float, mbu: float, mfu: float, ceilings: Ceilings) -> str:
    """`memory`, `compute`, or `overhead` where the run is far below both ceilings."""
    if max(mbu, mfu) < OVERHEAD_SHARE:
        return "overhead"
    return "memory" if intensity < ridge(ceilings.flops, ceilings.bandwidth) else "compute"


def explain(point: PhasePoint) -> str:
    """One sentence for the report: what limits this phase, and whether smaller weights can help."""
    share = f"{point.mbu:.1%} of the measured bandwidth and {point.mfu:.1%} of the measured peak"
    if point.bound == "overhead":
        return (
            f"{point.phase.capitalize()} uses {share}: neither memory nor arithmetic limits it, its "
            "operations are too small for either. A difference in speed between formats comes from "
            "what their kernels cost on so little work, not from the bytes saved."
        )
    if point.bound == "memory":
        return (
            f"{point.phase.capitalize()} uses {share}: it is limited by reading weights and cache, "
            "so a smaller format can make it faster."
        )
    return (
        f"{point.phase.capitalize()} uses {share}: it is limited by arithmetic, so a format that "
        "only shrinks the weights cannot make it faster."
    )


def roofline_part(
    steps: Sequence[StepRecord],
    shape: ModelShape,
    ceilings: Ceilings,
    sizes: ByteSizes,
) -> dict[str, Any]:
    """`llmopt.roofline` of a result: the measured ceilings, and a point per phase with its explanation."""
    points = [measure(steps, shape, ceilings, sizes) for measure in (prefill_point, decode_point)]
    decode = points[1]
    generated = sum(step.num_sequences for step in steps if step.decode_only)
    return {
        "ceilings": {**asdict(ceilings), "bandwidth": ceilings.bandwidth, "flops": ceilings.flops},
        "points": [{**asdict(p), "explanation": explain(p)} for p in points if p is not None],
        "bytes_per_decoded_token": (
            decode.bytes_per_step * decode.num_steps / generated if decode else None
        ),
    }


def memory_part(engine: Engine, model: Path, peak_bytes: int | None) -> dict[str, Any]:
    """`llmopt.memory`: bytes held by the engine, checkpoint size, and peak resident bytes of the process; the
    peak is None where other models share the process."""
    checkpoint = open_checkpoint(model)
    text = checkpoint.text_config
    return {
        "weight_bytes": engine.memory.weight_bytes,
        "checkpoint_bytes": checkpoint.weight_bytes,
        "checkpoint_dtype": text.get("dtype") or text.get("torch_dtype"),
        "kv_cache_bytes": engine.memory.kv_cache_bytes,
        "state_bytes": engine.memory.state_bytes,
        "kv_cache": {
            "dtype": engine.stats.kv_dtype,
            "bytes_per_token": engine.memory.kv_bytes_per_token,
            "tokens": engine.stats.kv_tokens_total,
            "blocks": engine.stats.kv_blocks_total,
        },
        "peak_resident_bytes": peak_bytes,
    }


def place_on_roofline(
    engine: Engine, model: Path, passes: Sequence[LoadPass]
) -> dict[str, Any] | None:
    """Measured ceilings and roofline points; None for a model whose shape the planner does not know."""
    from ...quant.families.config import model_shape

    try:
        shape = model_shape(open_checkpoint(model).config)
    except BadInput:
        return None
    memory = engine.memory
    # A tied embedding is also the LM head; the planner counts it once, as read.
    weight_bytes = memory.weight_bytes_per_step if shape.tied else memory.weight_bytes
    return roofline_part(
        [step for load_pass in passes for step in load_pass.steps],
        shape,
        measure_ceilings(engine.device, engine.dtype, weight_bytes),
        ByteSizes(
            weight_bytes,
            kv_bytes_per_element=memory.kv_bytes_per_token / shape.kv_bytes_per_token(1),
            unquantized_bytes=engine.dtype.itemsize,
        ),
    )
