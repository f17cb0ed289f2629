# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Rows of activations rounded to 8 bits: codes and scales, as `fake_quantize_activations` has them to the bit."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ....quant.tensors.fp8 import E4M3_MAX
from ..common.runtime import power_of_two
from .fake_quantize import RUN
from .quantized_activations import ActivationQuant, QuantizedActivations


@triton.jit
def quantize_block(
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
    """A whole row `x [BLOCK]`, whose first SIZE elements are in `mask`; `RUN` of them share a scale."""
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
    """Grid: rows, tiles of runs. `RUN` elements share a scale; `WIDTH` is a power of two and holds them."""
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
    """`x [tokens, in]` as codes and scales."""
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
    """Room for as many rows of `size` elements as `x` has."""
    activations, rows = activation_quant.activations, x.shape[0]
    num_runs = -(-size // RUN) if activations.granularity == "group128" else 1
    dtype = torch.int8 if activations.kind == "int8" else torch.float8_e4m3fn
    codes = torch.empty(rows, size, dtype=dtype, device=x.device)
    return QuantizedActivations(
        codes, torch.empty(rows, num_runs, dtype=torch.float32, device=x.device)
    )


def constants(activation_quant: ActivationQuant) -> dict[str, float | bool]:
    """What `quantize_block` is compiled for."""
    is_int8 = activation_quant.activations.kind == "int8"
    return {
        "LEVELS": 127.5 if is_int8 else E4M3_MAX,
        "IS_INT8": is_int8,
        "IS_FIXED": activation_quant.input_scale is not None,
    }


def store_arguments(
    rows: QuantizedActivations, activation_quant: ActivationQuant, block: int
) -> dict[str, Any]:
    """Arguments of a kernel that stores its rows with `store_quantized`."""
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
    """The same, for rows that stay floats."""
    pointers = {"scale_ptr": unread, "fixed_ptr": unread}
    nothing = {"RUN": 0, "LEVELS": 0.0, "IS_INT8": False, "IS_FIXED": False}
    return {**pointers, "num_runs": 0, **nothing}


def block_of(size: int) -> int:
    """Elements of a program that has a row of so many."""
    return max(RUN, power_of_two(size))
