# pyright: reportCallIssue=false
"""Fused add + RMSNorm in Triton, optionally with quantized output."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from ..activations.quantized_activations import ActivationQuant, QuantizedActivations
from ..activations.triton_per_token_quant import (
    block_of,
    empty_quantized,
    store_arguments,
    store_float_arguments,
    store_quantized,
)


@triton.jit
def _norm(
    x_ptr,
    added_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    scale_ptr,
    fixed_ptr,
    num_runs,
    x_row,
    added_row,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    RUN: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Grid: rows. The sum is rounded to the stored dtype before its norm is taken, as in torch.

    `RUN`: group size of the output's quantization; 0: unquantized.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < SIZE
    x = tl.load(x_ptr + row * x_row + lanes, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added_ptr + row * added_row + lanes, mask=mask, other=0.0).to(tl.float32)
        stored_sum = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + lanes, stored_sum, mask=mask)
        x = stored_sum.to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    out = (x * factor * weight).to(x_ptr.dtype.element_ty)
    if RUN > 0:
        out = out.to(tl.float32)
        store_quantized(
            out,
            mask,
            out_ptr,
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
    else:
        tl.store(out_ptr + row * SIZE + lanes, out, mask=mask)


class TritonNorm:
    """RMSNorm with a weight [size], of the rows' dtype or of float32."""

    takes_wide_weights: ClassVar[bool] = True

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight.contiguous(), eps

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x [rows, size]` and, of the same shape, `added`; returns their sum and its norm."""
        out = x.new_empty(x.shape)
        return self._run(x, added, out, store_float_arguments(out)), out

    def quantized(
        self, x: torch.Tensor, added: torch.Tensor | None, activation_quant: ActivationQuant
    ) -> tuple[torch.Tensor, QuantizedActivations]:
        """The same, with a quantized norm."""
        rows = empty_quantized(x, x.shape[1], activation_quant)
        return self._run(
            x, added, rows.codes, store_arguments(rows, activation_quant, block_of(x.shape[1]))
        ), rows

    def _run(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        out: torch.Tensor,
        stored: dict[str, Any],
    ) -> torch.Tensor:
        """Write the norm to `out`; returns the sum."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, size = x.shape
        other, total = x, x
        if added is not None:
            other = added if added.stride(1) == 1 else added.contiguous()
            total = x.new_empty(rows, size)
        if rows:
            block = block_of(size)
            _norm[(rows,)](
                x,
                other,
                total,
                out,
                self._weight,
                x_row=x.stride(0),
                added_row=other.stride(0),
                eps=self._eps,
                SIZE=size,
                BLOCK=block,
                HAS_ADDED=added is not None,
                **stored,
                num_warps=min(16, max(1, block // 512)),
            )
        return total
