# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
"""From the codes of a tile to the values that they stand for, in a program of Triton's."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .tile_weight import OUTPUTS, TileWeight


@triton.jit
def scale_of(ptr, outer_ptr, group, output, columns, NESTED: tl.constexpr):
    """Float32 `[OUTPUTS]`: scales, or lows, of a group."""
    scale = tl.load(ptr + group * columns + output).to(tl.float32)
    if NESTED > 0:
        scale *= tl.load(outer_ptr + (group // NESTED) * columns + output).to(tl.float32)
    return scale


@triton.jit
def values_of(
    packed,
    half,
    low_ptr,
    outer_low_ptr,
    scale_ptr,
    outer_scale_ptr,
    table_ptr,
    group,
    output,
    columns,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE_ROW: tl.constexpr,
):
    """Values `[OUTPUTS, HALF]` of half a run: still to be scaled, unless the grid is affine."""
    codes = packed
    if BITS == 4:
        codes = (packed >> (half * 4)) & 15
    if KIND == "element":
        value = packed
    elif KIND == "table":
        value = tl.load(table_ptr + output[:, None] * TABLE_ROW + codes.to(tl.int32))
    elif KIND == "e4m3":
        # In float16's places the exponent is 8 too small; its subnormal numbers are e4m3's as well.
        bits = codes.to(tl.uint16)
        bits = ((bits & 128) << 8) | ((bits & 127) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        # The last bits of 2**23, which take no conversion to become a float.
        value = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        if IS_AFFINE:
            scale = scale_of(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
            low = scale_of(low_ptr, outer_low_ptr, group, output, columns, NESTED)
            value = (value - 8388608.0) * scale[:, None] - low[:, None]
        elif ZERO < 0:
            zero = tl.load(low_ptr + group * columns + output).to(tl.float32)
            value = value - (8388608.0 + zero)[:, None]
        else:
            value = value - (8388608.0 + ZERO)
    return value


@triton.jit
def _unpack(
    code_ptr,
    scale_ptr,
    outer_scale_ptr,
    low_ptr,
    outer_low_ptr,
    table_ptr,
    out_ptr,
    num_outputs,
    columns,
    num_runs,
    code_tile,
    code_run,
    code_row,
    OUTPUTS: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE_ROW: tl.constexpr,
):
    """The weight as floats [outputs, inputs]. Grid: tiles of outputs, runs."""
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    tile = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, HALF)
    within = tl.arange(0, OUTPUTS)[:, None].to(tl.int64) * code_row + lanes[None, :]
    packed = tl.load(code_ptr + tile * code_tile + run * code_run + within)
    for half in tl.static_range(HALVES):
        first = (run * HALVES + half) * HALF
        group = first // GROUP if GROUP > 0 else 0
        value = values_of(
            packed,
            half,
            low_ptr,
            outer_low_ptr,
            scale_ptr,
            outer_scale_ptr,
            table_ptr,
            group,
            output,
            columns,
            KIND,
            BITS,
            ZERO,
            IS_AFFINE,
            NESTED,
            TABLE_ROW,
        ).to(tl.float32)
        if not IS_AFFINE:
            scale = scale_of(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
            value = value * scale[:, None]
        place = output[:, None] * (num_runs * HALVES * HALF) + first + lanes[None, :]
        out = value.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, out, mask=(output < num_outputs)[:, None])


def dequantize(weight: TileWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight as floats [out, in], with its columns as they are stored."""
    shape = (weight.out_features, weight.in_features)
    out = torch.empty(shape, dtype=dtype, device=weight.codes.device)
    _unpack[(weight.padded // OUTPUTS, weight.num_runs)](
        weight.codes,
        *pointers(weight),
        out,
        weight.out_features,
        weight.padded,
        weight.num_runs,
        *strides(weight, OUTPUTS),
        OUTPUTS=OUTPUTS,
        **constants(weight),
        num_warps=4,
    )
    return out


def pointers(weight: TileWeight) -> list[torch.Tensor]:
    """Scales, lows and table; what the weight lacks is not read."""
    parts = (weight.outer_scales, weight.lows, weight.outer_lows, weight.table)
    return [weight.scales, *(weight.scales if part is None else part for part in parts)]


def strides(weight: TileWeight, outputs: int) -> tuple[int, int, int]:
    """Codes from tile to tile of so many outputs, from run to run, and from output to output."""
    if weight.is_paired:
        return weight.codes.stride(0), weight.codes.stride(1), weight.codes.stride(2)
    row = weight.codes.stride(0)
    return outputs * row, weight.half, row


def constants(weight: TileWeight) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {
        "HALF": weight.half,
        "BITS": 4 if weight.is_paired else 8,
        "KIND": weight.kind,
        "GROUP": weight.group,
        "ZERO": weight.zero,
        "IS_AFFINE": weight.is_affine,
        "NESTED": weight.nested,
        "TABLE_ROW": 0 if weight.table is None or len(weight.table) == 1 else weight.table.shape[1],
    }
