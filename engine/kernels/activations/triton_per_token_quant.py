# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Per-token and per-group activation quantization; bit-identical to `fake_quantize_activations`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ....quant.kinds.fp8.kind import E4M3_MAX
from ..common.runtime import power_of_two
from .fake_quantize import RUN
from .quantized_activations import ActivationQuant, QuantizedActivations


@triton.jit
def quantize_block(
    x, mask, fixed_ptr, LEVELS: tl.constexpr, IS_INT8: tl.constexpr, IS_FIXED: tl.constexpr
):
    """Scale float32 `x [groups, width]` into the range of its codes; returns it and the scales `[groups]`."""
    if IS_FIXED:
        scale = tl.load(fixed_ptr) + tl.zeros([x.shape[0]], tl.float32)
    else:
        largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
        scale = tl.div_rn(largest, tl.full([x.shape[0]], LEVELS, tl.float32))
        scale = tl.where(scale > 0.0, scale, 1.0)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if IS_INT8:
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # Adding 1.5 * 2**23 leaves a float32 no fraction bits: rounds half to even, as torch does.
        x = (x + 12582912.0) - 12582912.0
    else:
        x = tl.minimum(tl.maximum(x, -LEVELS), LEVELS)
    return x, scale


@triton.jit
def store_quantized(
    x,
    mask,
    code_ptr,
    scale_ptr,
    fixed_ptr,
    row,
    num_runs,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Quantize and store a whole row `x [BLOCK]`; `mask` is its first SIZE elements, `RUN` the group size."""
    RUNS: tl.constexpr = BLOCK // RUN
    x, scale = quantize_block(
        tl.reshape(x, [RUNS, RUN]),
        tl.reshape(mask, [RUNS, RUN]),
        fixed_ptr,
        LEVELS,
        IS_INT8,
        IS_FIXED,
    )
    lanes = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    tl.store(code_ptr + row * SIZE + lanes, x.to(code_ptr.dtype.element_ty), mask=lanes < SIZE)
    run = tl.arange(0, RUNS)
    tl.store(scale_ptr + row * num_runs + run, scale, mask=run < num_runs)


@triton.jit
def _per_token_quant(
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
    """Grid: rows, tiles of groups. `RUN` is the group size; `WIDTH` the power of two that holds it."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    within = tl.arange(0, WIDTH)
    lanes = run[:, None] * RUN + within[None, :]
    mask = (within < RUN)[None, :] & (lanes < size)
    x = tl.load(x_ptr + row * x_row + lanes, mask=mask, other=0.0).to(tl.float32)
    x, scale = quantize_block(x, mask, fixed_ptr, LEVELS, IS_INT8, IS_FIXED)
    tl.store(code_ptr + row * size + lanes, x.to(code_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row * num_runs + run, scale, mask=run < num_runs)


def round_rows(x: torch.Tensor, activation_quant: ActivationQuant) -> QuantizedActivations:
    """Quantize `x [tokens, in]`: codes and scales."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, size = x.shape
    rows = empty_quantized(x, size, activation_quant)
    num_runs = rows.scales.shape[1]
    if tokens:
        run = RUN if activation_quant.activations.granularity == "group128" else size
        runs, width = min(8, power_of_two(num_runs)), power_of_two(run)
        _per_token_quant[(tokens, -(-num_runs // runs))](
            x,
            rows.codes,
            rows.scales,
            rows.scales if activation_quant.input_scale is None else activation_quant.input_scale,
            x.stride(0),
            size,
            num_runs,
            RUNS=runs,
            RUN=run,
            WIDTH=width,
            **constants(activation_quant),
            num_warps=min(16, max(1, runs * width // 512)),
        )
    return rows


def empty_quantized(
    x: torch.Tensor, size: int, activation_quant: ActivationQuant
) -> QuantizedActivations:
    """Uninitialised quantized activations: as many rows as `x`, of `size` elements each."""
    activations, rows = activation_quant.activations, x.shape[0]
    num_runs = -(-size // RUN) if activations.granularity == "group128" else 1
    dtype = torch.int8 if activations.kind == "int8" else torch.float8_e4m3fn
    codes = torch.empty(rows, size, dtype=dtype, device=x.device)
    return QuantizedActivations(
        codes, torch.empty(rows, num_runs, dtype=torch.float32, device=x.device)
    )


def constants(activation_quant: ActivationQuant) -> dict[str, float | bool]:
    """Compile-time constants of `quantize_block`."""
    is_int8 = activation_quant.activations.kind == "int8"
    return {
        "LEVELS": 127.5 if is_int8 else E4M3_MAX,
        "IS_INT8": is_int8,
        "IS_FIXED": activation_quant.input_scale is not None,
    }


def store_arguments(
    rows: QuantizedActivations, activation_quant: ActivationQuant, block: int
) -> dict[str, Any]:
    """Arguments of a kernel that stores its output with `store_quantized`."""
    num_runs = rows.scales.shape[1]
    return {
        "scale_ptr": rows.scales,
        "fixed_ptr": rows.scales
        if activation_quant.input_scale is None
        else activation_quant.input_scale,
        "num_runs": num_runs,
        "RUN": RUN if activation_quant.activations.granularity == "group128" else block,
        **constants(activation_quant),
    }


def store_float_arguments(unread: torch.Tensor) -> dict[str, Any]:
    """The same arguments for an unquantized output; `unread` fills the unused pointers."""
    pointers = {"scale_ptr": unread, "fixed_ptr": unread}
    nothing = {"RUN": 0, "LEVELS": 0.0, "IS_INT8": False, "IS_FIXED": False}
    return {**pointers, "num_runs": 0, **nothing}


def block_of(size: int) -> int:
    """Block size of a program that holds a row of `size` elements."""
    return max(RUN, power_of_two(size))
