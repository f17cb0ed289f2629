# pyright: reportCallIssue=false
"""Gated activations in Triton (SwiGLU, GeGLU): `activation(gate) * up`, optionally with quantized output."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from ..activations.quantized_activations import ActivationQuant, QuantizedActivations
from ..activations.triton_per_token_quant import (
    block_of,
    empty_quantized,
    store_arguments,
    store_quantized,
)

BLOCK = 1024
SWIGLU_ALPHA = tl.constexpr(1.702)
SWIGLU_LIMIT = tl.constexpr(7.0)
"""Of gpt-oss: gate and up are clamped to the limit."""
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """`activation(gate) * up`, rounded to `dtype` after the activation, as torch's two operations are."""
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, SWIGLU_LIMIT)
        up = tl.minimum(tl.maximum(up, -SWIGLU_LIMIT), SWIGLU_LIMIT) + 1.0
        active = gate / (1.0 + tl.exp(gate * -SWIGLU_ALPHA))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    return (active.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _gate(
    gate_ptr,
    up_ptr,
    out_ptr,
    size,
    gate_row,
    up_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows, blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < size
    gate = tl.load(gate_ptr + row * gate_row + lanes, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + lanes, mask=mask, other=0.0).to(tl.float32)
    out = activated(gate, up, gate_ptr.dtype.element_ty, ACTIVATION)
    tl.store(out_ptr + row * size + lanes, out, mask=mask)


@triton.jit
def _quantized_gate(
    gate_ptr,
    up_ptr,
    code_ptr,
    scale_ptr,
    fixed_ptr,
    num_runs,
    gate_row,
    up_row,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Gated activation with quantized output. Grid: whole rows, because a scale depends on all of a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < SIZE
    gate = tl.load(gate_ptr + row * gate_row + lanes, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + lanes, mask=mask, other=0.0).to(tl.float32)
    out = activated(gate, up, gate_ptr.dtype.element_ty, ACTIVATION).to(tl.float32)
    store_quantized(
        out,
        mask,
        code_ptr,
        scale_ptr,
        fixed_ptr,
        row,
        num_runs,
        SIZE,
        BLOCK,
        RUN,
        LEVELS,
        IS_INT8,
        IS_FIXED,
    )


class TritonGate:
    """`activation(gate) * up`, of `[rows, size]` each, which may be slices of wider rows."""

    def __init__(self, activation: Activation) -> None:
        self.activation: Activation = activation

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.stride(1) != 1 or up.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        rows, size = gate.shape
        out = gate.new_empty(rows, size)
        if rows:
            _gate[(rows, -(-size // BLOCK))](
                gate,
                up,
                out,
                size,
                gate.stride(0),
                up.stride(0),
                ACTIVATION=self.activation,
                BLOCK=BLOCK,
                num_warps=4,
            )
        return out

    def quantized(
        self, gate: torch.Tensor, up: torch.Tensor, activation_quant: ActivationQuant
    ) -> QuantizedActivations:
        """The same, with quantized output."""
        if gate.stride(1) != 1 or up.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        count, size = gate.shape
        rows, block = empty_quantized(gate, size, activation_quant), block_of(size)
        if count:
            _quantized_gate[(count,)](
                gate,
                up,
                rows.codes,
                gate_row=gate.stride(0),
                up_row=up.stride(0),
                ACTIVATION=self.activation,
                SIZE=size,
                BLOCK=block,
                **store_arguments(rows, activation_quant, block),
                num_warps=min(16, max(1, block // 512)),
            )
        return rows
