"""Roofline model: bytes and FLOP of prefill and decode steps, and the seconds that they bound.

A multiply-add counts as two FLOP. Bytes are those of the weights and the KV cache, read once per step. The
roofline gives bounds, against which benchmarks plot their measured points, and times at the shares of the
roofs that one machine reached; `expected` has the times of a fitted step model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from ...quant.families.shapes import ModelShape, Role
from .devices import Device
from .memory import Deployment, Reserve
from .step_model import ACTIVATION_BYTES
from .weights import UNQUANTIZED_BYTES, weight_bytes

Bound = Literal["bandwidth", "compute"]


def attainable_flops(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """The roofline: attainable FLOP/s at an arithmetic intensity in FLOP per byte."""
    return min(peak_flops, intensity * bandwidth)


def ridge(peak_flops: float, bandwidth: float) -> float:
    return peak_flops / bandwidth


def streamed_weight_bytes(
    shape: ModelShape,
    weight_bytes: float,
    num_tokens: int,
    unquantized_bytes: float = UNQUANTIZED_BYTES,
) -> float:
    """Bytes of weights that one step of `num_tokens` tokens reads. An untied input embedding is looked up,
    not streamed. Of MoE experts, only those are read that a token is routed to: the expected number under
    uniform routing, which is an upper bound. `weight_bytes` is the size of all weights; `unquantized_bytes`
    is the element size of the embedding and the other unquantized tensors."""
    read = weight_bytes - shape.looked_up_elements * unquantized_bytes
    if shape.experts is None:
        return read
    elements: Counter[Role] = Counter()
    for tensor in shape.tensors():
        elements[tensor.role] += tensor.num_elements * tensor.count
    expert, linear = elements["expert"], elements["linear"]
    other = elements.total() - expert - linear
    expert_bytes = (weight_bytes - other * unquantized_bytes) * expert / (expert + linear)
    idle = 1 - shape.experts.expected_distinct(num_tokens) / shape.experts.count
    return read - expert_bytes * idle


def decode_step_bytes(
    shape: ModelShape,
    batch: int,
    context: float,
    weight_bytes: float,
    kv_bytes_per_element: float,
    unquantized_bytes: float = UNQUANTIZED_BYTES,
) -> float:
    """Bytes that a decode step reads: the weights once, and the KV cache of `batch` sequences of
    `context` tokens, each layer within its window. `weight_bytes` is the size of all weights."""
    weights = streamed_weight_bytes(shape, weight_bytes, batch, unquantized_bytes)
    cache = shape.visible_elements(context) * kv_bytes_per_element + shape.state_bytes
    return weights + batch * cache


def decode_step_flops(shape: ModelShape, batch: int, context: float) -> float:
    """FLOP of a decode step of `batch` sequences of `context` tokens. MLA is counted in its absorbed form,
    which attends over the latents."""
    if shape.latent:
        per_key = shape.num_heads * (2 * shape.latent.kv_rank + shape.latent.rope_dim)
    else:
        per_key = 2 * shape.num_heads * shape.head_dim
    keys = sum(context if window is None else min(context, window) for window in shape.windows)
    parameters = _matmul_parameters(shape) + shape.vocab_size * shape.hidden_size
    return batch * 2 * parameters + 2 * batch * keys * per_key


def prefill_flops(shape: ModelShape, num_tokens: int, num_cached: int = 0) -> float:
    """FLOP of a prefill of `num_tokens` prompt tokens after `num_cached` cached ones: causal attention
    within each layer's window, and the logits of one row."""
    value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
    per_pair = 2 * shape.num_heads * (shape.head_dim + value_dim)
    end = num_cached + num_tokens
    pairs = sum(_pairs(end, w) - _pairs(num_cached, w) for w in shape.windows)
    head = shape.vocab_size * shape.hidden_size
    return 2 * _matmul_parameters(shape) * num_tokens + per_pair * pairs + 2 * head


def _pairs(num_tokens: int, window: int | None) -> int:
    """Query-key pairs of causal attention: token i attends to min(i, window) keys, itself included."""
    if window is None or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window


def _matmul_parameters(shape: ModelShape) -> int:
    """Parameters of the GEMMs that each token takes part in, without the output head."""
    multiplied = ("linear", "expert", "router")
    return sum(t.num_elements * t.used for t in shape.tensors() if t.role in multiplied)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the data-sheet peaks that a step reaches (MBU, MFU), its fixed overheads, and where the
    numbers come from."""

    bandwidth: float
    compute: float
    seconds_per_layer: float
    seconds_per_all_reduce: float
    source: str


DATA_SHEET = Efficiency(1.0, 1.0, 0.0, 0.0, "the data sheet")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step in seconds: its roofline bound and its parts. `moving` (memory traffic) and `computing`
    overlap, so the longer one counts; `fixed` (kernel launches) and `communication` (all-reduces, sends
    between pipeline stages) are added. `num_bytes` is per rank, `flops` of all ranks. `operators`, where a
    step model gives them, are names, seconds and sources."""

    seconds: float
    bound: Bound
    moving: float
    computing: float
    fixed: float
    communication: float
    num_bytes: float
    flops: float
    operators: tuple[tuple[str, float, str], ...] = ()


def decode_time(
    plan: Deployment,
    device: Device,
    batch: int,
    context: int,
    efficiency: Efficiency,
    tokens_per_sequence: int = 1,
) -> StepTime:
    """Time of one decode step of `batch` sequences (TPOT). With pipeline stages the batch is split into as
    many micro-batches, and a token passes all stages. `tokens_per_sequence` is above 1 for a step that
    verifies draft tokens."""
    micro_batch = ceil(batch / plan.pp)
    # Each rank holds its shard of the KV heads, or a replica of one.
    cached = (
        stage.cache.visible_elements(context) * plan.kv_bytes_per_element + stage.cache.state_bytes
        for stage in plan.stages
    )
    tokens = micro_batch * tokens_per_sequence
    return _step_time(
        plan,
        device,
        efficiency,
        num_bytes=_streamed_on_rank(plan, tokens) + float(micro_batch * sum(cached)),
        flops=tokens_per_sequence * decode_step_flops(plan.shape, micro_batch, context),
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
    whole = _step_time(
        plan,
        device,
        efficiency,
        num_bytes=steps * _streamed_on_rank(plan, per_step),
        flops=prefill_flops(plan.shape, num_tokens),
        tokens=num_tokens,
        steps=steps,
    )
    overlap = (steps + plan.pp - 1) / (steps * plan.pp)
    parts = ("seconds", "moving", "computing", "fixed", "communication")
    return replace(whole, **{part: getattr(whole, part) * overlap for part in parts})


def _streamed_on_rank(plan: Deployment, tokens: int) -> float:
    """Bytes of weights that one rank of each stage reads in a step, summed over the stages."""
    total = weight_bytes(plan.shape, plan.recipe)
    read = streamed_weight_bytes(plan.shape, total, tokens, plan.recipe.embedding_bytes)
    return read * sum(stage.weight_bytes for stage in plan.stages) / total


def _step_time(
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
    message = tokens * plan.shape.hidden_size * ACTIVATION_BYTES
    communication = 0.0
    if plan.tp > 1:
        all_reduces = 2 * plan.shape.num_layers
        transfer = 2 * (plan.tp - 1) / plan.tp * message / device.link_bytes_per_second
        communication += all_reduces * (steps * efficiency.seconds_per_all_reduce + transfer)
    communication += (plan.pp - 1) * (
        steps * efficiency.seconds_per_all_reduce + message / device.link_bytes_per_second
    )
    return StepTime(
        max(moving, computing) + fixed + communication,
        "bandwidth" if moving >= computing else "compute",
        moving,
        computing,
        fixed,
        communication,
        num_bytes,
        flops,
    )
