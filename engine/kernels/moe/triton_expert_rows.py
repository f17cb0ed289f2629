# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false
"""Rows of routed experts in Triton: bias and gated activation, and the sum over a token's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..elementwise.triton_gate import Activation, activated

BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _biased_gate(
    row_ptr,
    bias_ptr,
    expert_ptr,
    out_ptr,
    size,
    row_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`activation(gate) * up` of rows [gate, up] plus their expert's bias. Grid: rows, blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < size
    bias = bias_ptr + tl.load(expert_ptr + row) * 2 * size + lanes
    place = row_ptr + row * row_stride + lanes
    dtype = row_ptr.dtype.element_ty
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=mask, other=0.0).to(tl.float32)
    up += tl.load(bias + size, mask=mask, other=0.0).to(tl.float32)
    # Rounded as the unfused sum is.
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + lanes, activated(gate, up, dtype, ACTIVATION), mask=mask)


def biased_gate(
    rows: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """`activation(gate) * up` [rows, inner] of `rows [rows, 2 * inner] + bias[experts]`, gate before up."""
    count, size = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty(count, size)
    if count:
        _biased_gate[(count, -(-size // BLOCK))](
            rows,
            bias,
            experts,
            out,
            size,
            rows.stride(0),
            ACTIVATION=activation,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["size"])
def _weighted_sum(
    row_ptr,
    weight_ptr,
    bias_ptr,
    expert_ptr,
    added_ptr,
    out_ptr,
    size,
    added_row,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of a token's rows in float32. Grid: tokens, blocks of a row."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < size
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        row = token * TOP_K + place
        x = tl.load(row_ptr + row * size + lanes, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = bias_ptr + tl.load(expert_ptr + row) * size + lanes
            x += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            x *= tl.load(weight_ptr + row)
        total += x
    if HAS_ADDED:
        added = added_ptr + token * added_row + lanes
        total += tl.load(added, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + lanes, total.to(out_ptr.dtype.element_ty), mask=mask)


def weighted_sum(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    top_k: int,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sum(weights * (rows + bias[experts])) + added` over the `top_k` rows of each token, [tokens, size].

    Args:
        rows: [tokens * top_k, size]; `experts`, their experts.
        weights: float32 [tokens, top_k]; None: 1.
        bias: [experts, size].
        added: [tokens, size].
    """
    size, tokens = rows.shape[1], rows.shape[0] // top_k
    out = rows.new_empty(tokens, size)
    if tokens:
        _weighted_sum[(tokens, -(-size // BLOCK))](
            rows,
            rows if weights is None else weights.contiguous(),
            rows if bias is None else bias,
            experts,
            rows if added is None else added,
            out,
            size,
            0 if added is None else added.stride(0),
            TOP_K=top_k,
            HAS_WEIGHTS=weights is not None,
            HAS_BIAS=bias is not None,
            HAS_ADDED=added is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
