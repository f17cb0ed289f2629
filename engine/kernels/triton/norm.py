# pyright: reportCallIssue=false
"""Root mean square norm of a row, or of the sum of two, read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import power_of_two


@triton.jit
def _norm(
    x_ptr,
    added_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    x_row,
    added_row,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    """Grid: rows. The sum is rounded before its norm is taken, as torch would."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < SIZE
    x = tl.load(x_ptr + row * x_row + lanes, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added_ptr + row * added_row + lanes, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + lanes, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    out = (x * factor * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + lanes, out, mask=mask)


class TritonNorm:
    """The norm with this weight [size]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight.contiguous(), eps

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x [rows, size]` and, of the same shape, `added`; returns their sum and its norm."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, size = x.shape
        out = x.new_empty(rows, size)
        other, total = x, x
        if added is not None:
            other = added if added.stride(1) == 1 else added.contiguous()
            total = x.new_empty(rows, size)
        if rows:
            block = power_of_two(size)
            _norm[(rows,)](
                x,
                other,
                total,
                out,
                self._weight,
                x.stride(0),
                other.stride(0),
                self._eps,
                SIZE=size,
                BLOCK=block,
                HAS_ADDED=added is not None,
                num_warps=min(16, max(1, block // 512)),
            )
        return total, out
