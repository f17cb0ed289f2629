"""Roofline model: bytes and FLOP of prefill and decode steps, and the attainable FLOP/s.

A multiply-add counts as two FLOP. Bytes are those of the weights and the KV cache, read once per step.
These are bounds, not measurements; benchmarks plot their measured points against them.
"""

from __future__ import annotations

from ..model.shapes import ModelShape
from ..model.weights import UNQUANTIZED_BYTES


def attainable_flops(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """The roofline: attainable FLOP/s at an arithmetic intensity in FLOP per byte."""
    return min(peak_flops, intensity * bandwidth)


def ridge(peak_flops: float, bandwidth: float) -> float:
    """Ridge point: FLOP per byte at which a device changes from memory-bound to compute-bound."""
    return peak_flops / bandwidth


def streamed_weight_bytes(
    shape: ModelShape,
    weight_bytes: float,
    num_tokens: int,
    unquantized_bytes: float = UNQUANTIZED_BYTES,
) -> float:
    """Bytes of weights that one step of `num_tokens` tokens reads.

    An untied input embedding is looked up, not streamed. Of MoE experts, only those are read that a token
    is routed to: the expected number under uniform routing, which is an upper bound. `weight_bytes` is the
    size of all weights; `unquantized_bytes` is the element size of the embedding and the other
    unquantized tensors.
    """
    read = weight_bytes - shape.looked_up_elements * unquantized_bytes
    if shape.experts is None:
        return read
    expert = linear = other = 0
    for tensor in shape.tensors():
        elements = tensor.num_elements * tensor.count
        if tensor.role == "expert":
            expert += elements
        elif tensor.role == "linear":
            linear += elements
        else:
            other += elements
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
    """FLOP of a decode step of `batch` sequences of `context` tokens.

    MLA is counted in its absorbed form, which attends over the latents.
    """
    if shape.latent:
        per_key = shape.num_heads * (2 * shape.latent.kv_rank + shape.latent.rope_dim)
    else:
        per_key = 2 * shape.num_heads * shape.head_dim
    attention = 2 * batch * _visible(shape, context) * per_key
    return batch * 2 * (_matmul_parameters(shape) + _head_parameters(shape)) + attention


def prefill_flops(shape: ModelShape, num_tokens: int, num_cached: int = 0) -> float:
    """FLOP of a prefill of `num_tokens` prompt tokens after `num_cached` cached ones: causal attention
    within each layer's window, and the logits of one row."""
    value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
    per_pair = 2 * shape.num_heads * (shape.head_dim + value_dim)
    end = num_cached + num_tokens
    pairs = sum(_pairs(end, w) - _pairs(num_cached, w) for w in shape.windows)
    return (
        2 * _matmul_parameters(shape) * num_tokens + per_pair * pairs + 2 * _head_parameters(shape)
    )


def _pairs(num_tokens: int, window: int | None) -> int:
    """Query-key pairs of causal attention: token i attends to min(i, window) keys, itself included."""
    if window is None or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window


def _visible(shape: ModelShape, context: float) -> float:
    """Keys that one token attends to, summed over the layers."""
    return sum(context if window is None else min(context, window) for window in shape.windows)


def _head_parameters(shape: ModelShape) -> int:
    return shape.vocab_size * shape.hidden_size


def _matmul_parameters(shape: ModelShape) -> int:
    """Parameters of the GEMMs that each token takes part in, without the output head."""
    multiplied = ("linear", "expert", "router")
    return sum(t.num_elements * t.used for t in shape.tensors() if t.role in multiplied)
