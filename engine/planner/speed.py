"""How long a prompt and a decode step take on a device: the bound, and what to expect of a good stack."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from .devices import Device
from .memory import Deployment, Reserve
from .roofline import decode_step_flops, prefill_flops, streamed_weight_bytes
from .weights import weight_bytes

Bound = Literal["bandwidth", "compute"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of the data sheet a step reaches, and what it costs whatever its size.

    The bandwidth share and the time per layer fit gpt-fast's published A100 runs (8 rows, mean error
    9 % left out, 17 % at most); the all-reduce latency is the mean of its residuals. The compute share
    is assumed, not measured.
    """

    bandwidth: float = 0.74
    compute: float = 0.6
    seconds_per_layer: float = 63e-6
    seconds_per_all_reduce: float = 25e-6


DATA_SHEET = Efficiency(1.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and which roof it meets."""

    seconds: float
    bound: Bound


def decode_time(
    plan: Deployment, device: Device, batch: int, context: int, efficiency: Efficiency
) -> StepTime:
    """Time of one decode step of `batch` sequences, which is the time per output token of each."""
    shape = plan.shape
    keys = sum(context if w is None else min(context, w) for w in shape.windows)
    cache = batch * keys * plan.cache.cached_elements * plan.kv_bytes_per_element
    return _time(
        plan,
        device,
        efficiency,
        num_bytes=_streamed_on_rank(plan, batch) + cache,
        flops=decode_step_flops(shape, batch, context),
        tokens=batch,
        steps=1,
    )


def prefill_time(
    plan: Deployment, device: Device, num_tokens: int, reserve: Reserve, efficiency: Efficiency
) -> StepTime:
    """Time to the first token of one prompt on an idle engine, in chunks of the reserve's size."""
    steps = ceil(num_tokens / reserve.chunk_tokens)
    per_step = min(num_tokens, reserve.chunk_tokens)
    return _time(
        plan,
        device,
        efficiency,
        num_bytes=steps * _streamed_on_rank(plan, per_step),
        flops=prefill_flops(plan.shape, num_tokens),
        tokens=num_tokens,
        steps=steps,
    )


def _streamed_on_rank(plan: Deployment, tokens: int) -> float:
    total = weight_bytes(plan.shape, plan.recipe)
    return streamed_weight_bytes(plan.shape, total, tokens) * plan.weight_bytes / total


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
    computing = flops / (plan.ranks * peak * efficiency.compute)
    fixed = steps * plan.shape.num_layers * efficiency.seconds_per_layer
    if plan.ranks > 1:
        all_reduces = 2 * plan.shape.num_layers
        message = tokens * plan.shape.hidden_size * 2
        travel = 2 * (plan.ranks - 1) / plan.ranks * message / device.link_bytes_per_second
        fixed += all_reduces * (steps * efficiency.seconds_per_all_reduce + travel)
    bound: Bound = "bandwidth" if moving >= computing else "compute"
    return StepTime(max(moving, computing) + fixed, bound)
