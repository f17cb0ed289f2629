"""Prefill and decode step times on a device: roofline bounds and expected values."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from ..memory.memory import Deployment, Reserve
from ..model.weights import weight_bytes
from .devices import Device
from .gpu_costs import ALL_REDUCE_SECONDS, LAYER_SECONDS, MULTIPLIED, STREAMED
from .roofline import decode_step_flops, prefill_flops, streamed_weight_bytes

Bound = Literal["bandwidth", "compute"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the data-sheet peaks that a step reaches (MBU, MFU), and its fixed overheads.

    By default the bandwidth fraction and the time per layer fit gpt-fast's published A100 runs (8 rows,
    mean error 9 % left out, 17 % at most); the all-reduce latency is the mean of its residuals. The
    compute fraction is assumed, not measured. `source` says where the numbers come from.
    """

    bandwidth: float = STREAMED
    compute: float = MULTIPLIED
    seconds_per_layer: float = LAYER_SECONDS
    seconds_per_all_reduce: float = ALL_REDUCE_SECONDS
    source: str = "bandwidth and layers: gpt-fast's published A100 runs; compute: assumed"


DEFAULT_EFFICIENCY = Efficiency()
DATA_SHEET = Efficiency(1.0, 1.0, 0.0, 0.0, "the data sheet")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step in seconds: its roofline bound and its parts.

    `moving` (memory traffic) and `computing` overlap, so the longer one counts; `fixed` (kernel launches)
    and `communication` (all-reduces, sends between pipeline stages) are added. `num_bytes` is per rank,
    `flops` of all ranks.
    """

    seconds: float
    bound: Bound
    moving: float
    computing: float
    fixed: float
    communication: float
    num_bytes: float
    flops: float


def decode_time(
    plan: Deployment,
    device: Device,
    batch: int,
    context: int,
    efficiency: Efficiency,
    tokens_per_sequence: int = 1,
) -> StepTime:
    """Time of one decode step of `batch` sequences (TPOT).

    With pipeline stages the batch is split into as many micro-batches, and a token passes all stages.
    `tokens_per_sequence` is above 1 for a step that verifies draft tokens.
    """
    shape = plan.shape
    micro_batch = ceil(batch / plan.pp)
    # Each rank holds its shard of the KV heads, or a replica of one.
    held = [stage.cache for stage in plan.stages]
    cache = micro_batch * sum(
        part.visible_elements(context) * plan.kv_bytes_per_element + part.state_bytes
        for part in held
    )
    tokens = micro_batch * tokens_per_sequence
    return _time(
        plan,
        device,
        efficiency,
        num_bytes=_streamed_on_rank(plan, tokens) + float(cache),
        flops=tokens_per_sequence * decode_step_flops(shape, micro_batch, context),
        tokens=tokens,
        steps=1,
    )


def prefill_time(
    plan: Deployment, device: Device, num_tokens: int, reserve: Reserve, efficiency: Efficiency
) -> StepTime:
    """TTFT of one prompt on an idle engine, with chunked prefill; the chunks are pipelined through the
    stages."""
    steps = ceil(num_tokens / reserve.chunk_tokens)
    per_step = min(num_tokens, reserve.chunk_tokens)
    whole = _time(
        plan,
        device,
        efficiency,
        num_bytes=steps * _streamed_on_rank(plan, per_step),
        flops=prefill_flops(plan.shape, num_tokens),
        tokens=num_tokens,
        steps=steps,
    )
    overlap = (steps + plan.pp - 1) / (steps * plan.pp)
    return StepTime(
        whole.seconds * overlap,
        whole.bound,
        whole.moving * overlap,
        whole.computing * overlap,
        whole.fixed * overlap,
        whole.communication * overlap,
        whole.num_bytes,
        whole.flops,
    )


def _streamed_on_rank(plan: Deployment, tokens: int) -> float:
    """Bytes of weights that one rank of each stage reads in a step, summed over the stages."""
    total = weight_bytes(plan.shape, plan.recipe)
    read = streamed_weight_bytes(plan.shape, total, tokens, plan.recipe.plain_bytes)
    return read * sum(stage.weight_bytes for stage in plan.stages) / total


def _time(
    plan: Deployment,
    device: Device,
    efficiency: Efficiency,
    *,
    num_bytes: float,
    flops: float,
    tokens: int,
    steps: int,
) -> StepTime:
    peak = device.peak_flops(plan.recipe.bits, plan.recipe.name)
    assert device.bandwidth and peak, f"{device.name} has no speed"
    moving = num_bytes / (device.bandwidth * efficiency.bandwidth)
    computing = flops / (plan.tp * peak * efficiency.compute)
    fixed = steps * plan.shape.num_layers * efficiency.seconds_per_layer
    message = tokens * plan.shape.hidden_size * 2
    communication = 0.0
    if plan.tp > 1:
        all_reduces = 2 * plan.shape.num_layers
        transfer = 2 * (plan.tp - 1) / plan.tp * message / device.link_bytes_per_second
        communication += all_reduces * (steps * efficiency.seconds_per_all_reduce + transfer)
    communication += (plan.pp - 1) * (
        steps * efficiency.seconds_per_all_reduce + message / device.link_bytes_per_second
    )
    bound: Bound = "bandwidth" if moving >= computing else "compute"
    return StepTime(
        max(moving, computing) + fixed + communication,
        bound,
        moving,
        computing,
        fixed,
        communication,
        num_bytes,
        flops,
    )
