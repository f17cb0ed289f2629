# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Rows of activations rounded to 8 bits: codes and scales, as `round_activations` has them to the bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....quant.scheme import Activations
from ....quant.tensors.fp8 import E4M3_MAX
from ..activations import RUN
from .runtime import power_of_two


@triton.jit
def round_block(
    x, mask, fixed_ptr, LEVELS: tl.constexpr, IS_INT8: tl.constexpr, IS_FIXED: tl.constexpr
):
    """Float32 `x [runs, width]` over its scales, within the range of its codes; and the scales `[runs]`."""
    if IS_FIXED:
        scale = tl.load(fixed_ptr) + tl.zeros([x.shape[0]], tl.float32)
    else:
        largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
        scale = tl.div_rn(largest, tl.full([x.shape[0]], LEVELS, tl.float32))
        scale = tl.where(scale > 0.0, scale, 1.0)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if IS_INT8:
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # Adding 1.5 * 2**23 leaves a float32 no fraction: halves go to even, as with torch.
        x = (x + 12582912.0) - 12582912.0
    else:
        x = tl.minimum(tl.maximum(x, -LEVELS), LEVELS)
    return x, scale


@triton.jit
def _round(
    x_ptr,
    code_ptr,
    scale_ptr,
    fixed_ptr,
    x_row,
    size,
    num_runs,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Grid: rows, tiles of runs. `RUN` elements share a scale; `WIDTH` is a power of two and holds them."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    within = tl.arange(0, WIDTH)
    lanes = run[:, None] * RUN + within[None, :]
    mask = (within < RUN)[None, :] & (lanes < size)
    x = tl.load(x_ptr + row * x_row + lanes, mask=mask, other=0.0).to(tl.float32)
    x, scale = round_block(x, mask, fixed_ptr, LEVELS, IS_INT8, IS_FIXED)
    tl.store(code_ptr + row * size + lanes, x.to(code_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row * num_runs + run, scale, mask=run < num_runs)


def round_rows(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x [tokens, in]` as codes, int8 or e4m3, and float32 scales, `[tokens, 1]` or one for 128 inputs."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, size = x.shape
    is_int8, in_runs = activations.kind == "int8", activations.granularity == "group128"
    run = RUN if in_runs else size
    num_runs = -(-size // run)
    codes = torch.empty(
        tokens, size, dtype=torch.int8 if is_int8 else torch.float8_e4m3fn, device=x.device
    )
    scales = torch.empty(tokens, num_runs, dtype=torch.float32, device=x.device)
    if tokens:
        runs, width = min(8, power_of_two(num_runs)), power_of_two(run)
        _round[(tokens, -(-num_runs // runs))](
            x,
            codes,
            scales,
            x if input_scale is None else input_scale,
            x.stride(0),
            size,
            num_runs,
            RUNS=runs,
            RUN=run,
            WIDTH=width,
            LEVELS=127.5 if is_int8 else E4M3_MAX,
            IS_INT8=is_int8,
            IS_FIXED=input_scale is not None,
            num_warps=min(16, max(1, runs * width // 512)),
        )
    return codes, scales
