# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
"""Products with weights as they are stored, `y = x @ weight.T`: one kernel for all grids and inputs.

A tile of codes becomes values in registers, of the type that the inputs have: bfloat16, float16, float32,
and int8 or e4m3 where the inputs were rounded to 8 bits. Scales multiply the sums over their groups, not the
values, which 16 bits therefore hold exactly where they are whole numbers. Where there are few outputs,
several programs share the inputs of a tile; how many depends on the weight alone, and so do the numbers of a
token among up to `FEW_TOKENS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .runtime import power_of_two
from .tile_weight import OUTPUTS, TileWeight

FEW_TOKENS = 64
"""Tokens of a call up to which its inputs are shared among programs."""
WANTED_PROGRAMS = 528
"""Four for each multiprocessor of a Hopper GPU."""


@triton.jit
def _scale(ptr, outer_ptr, group, output, columns, NESTED: tl.constexpr):
    """Float32 `[OUTPUTS]`: scales, or lows, of a group."""
    scale = tl.load(ptr + group * columns + output).to(tl.float32)
    if NESTED > 0:
        scale *= tl.load(outer_ptr + (group // NESTED) * columns + output).to(tl.float32)
    return scale


@triton.jit
def _values(
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
            scale = _scale(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
            low = _scale(low_ptr, outer_low_ptr, group, output, columns, NESTED)
            value = (value - 8388608.0) * scale[:, None] - low[:, None]
        elif ZERO < 0:
            zero = tl.load(low_ptr + group * columns + output).to(tl.float32)
            value = value - (8388608.0 + zero)[:, None]
        else:
            value = value - (8388608.0 + ZERO)
    return value


@triton.jit
def _product(
    x_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    outer_scale_ptr,
    low_ptr,
    outer_low_ptr,
    table_ptr,
    out_ptr,
    source_ptr,
    part_ptr,
    num_rows,
    num_outputs,
    columns,
    num_runs,
    runs_each,
    x_row,
    x_scale_row,
    code_tile,
    code_run,
    code_row,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    X_RUN: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: tiles of outputs, shares of the inputs, tiles of rows. `out_ptr` [shares, rows, outputs].

    `X_RUN`: inputs that share a scale of theirs; 0: all of a row; -1: inputs are floats. With `HAS_PARTS` a
    tile of rows has its own part of the weight, first row and last, and `source_ptr` says which row of `x`
    each is.
    """
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    # An affine grid's values are scaled already. Hopper adds products of e4m3 with few bits: not for long.
    IS_E4M3: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
    BY_GROUP: tl.constexpr = (GROUP > 0 and not IS_AFFINE) or X_RUN > 0 or IS_E4M3
    TYPE: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    tile = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1).to(tl.int64)
    column = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if HAS_PARTS:
        at = part_ptr + tl.program_id(2) * 3
        row = tl.load(at + 1).to(tl.int64) + tl.arange(0, ROWS)
        end = tl.load(at + 2)
        is_row = row < end
        source = tl.load(source_ptr + row, mask=is_row, other=0)
        tile += tl.load(at) * tl.num_programs(0)
        # A tile without rows has nothing to do.
        num_runs = tl.where(tl.load(at + 1) < end, num_runs, 0)
    else:
        row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        source = row
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, HALF)
    within = tl.arange(0, OUTPUTS)[:, None].to(tl.int64) * code_row + lanes[None, :]
    sums = tl.full([ROWS, OUTPUTS], 0, TYPE)
    total = tl.full([ROWS, OUTPUTS], 0.0, tl.float32)
    end_run = tl.minimum(share * runs_each + runs_each, num_runs)
    for run in tl.range(share * runs_each, end_run, num_stages=STAGES):
        packed = tl.load(code_ptr + tile * code_tile + run * code_run + within)
        for half in tl.static_range(HALVES):
            first = (run * HALVES + half) * HALF
            group = first // GROUP if GROUP > 0 else 0
            value = _values(
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
            )
            place = x_ptr + source[:, None] * x_row + first + lanes[None, :]
            x = tl.load(place, mask=is_row[:, None], other=0.0)
            if BY_GROUP:
                sums = tl.full([ROWS, OUTPUTS], 0, TYPE)
            if ROWS == 1:
                sums += tl.sum(value.to(TYPE) * x.to(TYPE), 1)[None, :]
            else:
                value = tl.trans(value.to(x.dtype))
                sums = tl.dot(x, value, sums, input_precision=PRECISION, out_dtype=TYPE)
            if BY_GROUP:
                part_sum = sums.to(tl.float32)
                if X_RUN > 0:
                    at = x_scale_ptr + source * x_scale_row + first // X_RUN
                    part_sum *= tl.load(at, mask=is_row, other=0.0)[:, None]
                if GROUP > 0 and not IS_AFFINE:
                    scale = _scale(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
                    part_sum *= scale[None, :]
                total += part_sum
    if not BY_GROUP:
        total = sums.to(tl.float32)
    if X_RUN == 0:
        total *= tl.load(x_scale_ptr + source * x_scale_row, mask=is_row, other=0.0)[:, None]
    if GROUP == 0 and not IS_AFFINE:
        total *= _scale(scale_ptr, outer_scale_ptr, 0, output, columns, NESTED)[None, :]
    place = (share * num_rows + row[:, None]) * num_outputs + column[None, :]
    mask = is_row[:, None] & (column < num_outputs)[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


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
        value = _values(
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
            scale = _scale(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
            value = value * scale[:, None]
        place = output[:, None] * (num_runs * HALVES * HALF) + first + lanes[None, :]
        out = value.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, out, mask=(output < num_outputs)[:, None])


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows that belong to parts of a weight, as experts have them.

    Attributes:
        tiles: int32 `[tiles, 3]`: part, first row and the row after the last; there may be none.
        source: int64 `[rows]`, the row of `x` that each is.
        rows: of a tile.
    """

    tiles: torch.Tensor
    source: torch.Tensor
    rows: int


def multiply(
    x: torch.Tensor,
    weight: TileWeight,
    dtype: torch.dtype,
    x_scales: torch.Tensor | None = None,
    parts: Parts | None = None,
) -> torch.Tensor:
    """`x [tokens, in] @ weight.T` in `dtype`, `[tokens, out]`, or `[rows, out]` of `parts`.

    Args:
        x: floats, or with `x_scales`, float32 `[tokens, 1]` or one for each 128 inputs, int8 or e4m3.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens = x.shape[0] if parts is None else parts.source.shape[0]
    if not tokens:
        return x.new_empty(0, weight.out_features, dtype=dtype)
    is_many = tokens > FEW_TOKENS and parts is None
    outputs = 2 * OUTPUTS if is_many and not weight.is_paired else OUTPUTS
    num_tiles = weight.padded // (outputs * weight.num_parts)
    shares = 1 if is_many else min(-(-WANTED_PROGRAMS // num_tiles), max(1, weight.num_runs // 4))
    runs_each = -(-weight.num_runs // shares)
    shares = -(-weight.num_runs // runs_each)
    if parts is not None:
        rows, row_tiles = parts.rows, parts.tiles.shape[0]
    else:
        # A tile of the matrix units has 16 rows at least.
        rows = 1 if tokens == 1 else min(2 * FEW_TOKENS, max(16, power_of_two(tokens)))
        row_tiles = -(-tokens // rows)
    wide = torch.float32 if shares > 1 else dtype
    out = torch.empty(shares, tokens, weight.out_features, dtype=wide, device=x.device)
    x_run = -1
    if x_scales is not None:
        x_run = 0 if x_scales.shape[1] == 1 else 128
    _product[(num_tiles, shares, row_tiles)](
        x,
        out if x_scales is None else x_scales,
        weight.codes,
        *_pointers(weight),
        out,
        out if parts is None else parts.source,
        out if parts is None else parts.tiles,
        tokens,
        weight.out_features,
        weight.padded,
        weight.num_runs,
        runs_each,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        *_strides(weight, outputs),
        ROWS=rows,
        OUTPUTS=outputs,
        X_RUN=x_run,
        IS_INTEGER=x.dtype is torch.int8,
        HAS_PARTS=parts is not None,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        **_constants(weight),
        num_warps=8 if rows * outputs > 64 * 64 else 4,
        STAGES=3 if rows * outputs > 64 * 64 else 4,
    )
    return out[0] if shares == 1 else out.sum(dim=0).to(dtype)


def dequantize(weight: TileWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight as floats [out, in], with its columns as they are stored."""
    shape = (weight.out_features, weight.in_features)
    out = torch.empty(shape, dtype=dtype, device=weight.codes.device)
    _unpack[(weight.padded // OUTPUTS, weight.num_runs)](
        weight.codes,
        *_pointers(weight),
        out,
        weight.out_features,
        weight.padded,
        weight.num_runs,
        *_strides(weight, OUTPUTS),
        OUTPUTS=OUTPUTS,
        **_constants(weight),
        num_warps=4,
    )
    return out


def _pointers(weight: TileWeight) -> list[torch.Tensor]:
    """Scales, lows and table; what the weight lacks is not read."""
    parts = (weight.outer_scales, weight.lows, weight.outer_lows, weight.table)
    return [weight.scales, *(weight.scales if part is None else part for part in parts)]


def _strides(weight: TileWeight, outputs: int) -> tuple[int, int, int]:
    """Codes from tile to tile of so many outputs, from run to run, and from output to output."""
    if weight.is_paired:
        return weight.codes.stride(0), weight.codes.stride(1), weight.codes.stride(2)
    row = weight.codes.stride(0)
    return outputs * row, weight.half, row


def _constants(weight: TileWeight) -> dict[str, int | float | bool | str]:
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
