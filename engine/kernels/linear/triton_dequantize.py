# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
"""Dequantization of packed weights in Triton: of a tile in registers, and of a whole weight."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .triton_packed_weight import OUTPUTS, TritonPackedWeight

MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
"""The bits of the number whose unit in the last place is 1 (128; 1024), in both halves of a word."""


@triton.jit
def scale_of(ptr, outer_ptr, group, output, columns, NESTED: tl.constexpr):
    """Scales, or minimums (offsets), of a group: float32 `[OUTPUTS]`."""
    scale = tl.load(ptr + group * columns + output).to(tl.float32)
    if NESTED > 0:
        scale *= tl.load(outer_ptr + (group // NESTED) * columns + output).to(tl.float32)
    return scale


@triton.jit
def group_of(run, piece, PIECES: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr):
    """The group of a piece, in a form that lets the compiler merge loads where a run spans whole groups."""
    if GROUP == 0:
        group = run * 0
    elif PIECES * PIECE % GROUP == 0:
        group = run * (PIECES * PIECE // GROUP) + piece * PIECE // GROUP
    else:
        group = (run * PIECES + piece) * PIECE // GROUP
    return group


@triton.jit
def dequantize_tile(
    packed,
    piece,
    magic,
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
    TYPE: tl.constexpr,
):
    """Dequantize a piece `[OUTPUTS, PIECE]` for a matmul in TYPE; unscaled, unless the grid is affine.

    `magic`: `MAGIC` of TYPE. It is an argument because the assembler splits the mask and a constant into two
    instructions.
    """
    IS_SHORT: tl.constexpr = TYPE.primitive_bitwidth == 16
    codes = packed
    if BITS == 4:
        pair = (packed >> (piece * 4)) & 0x000F000F
        if KIND == "code" and IS_SHORT and not IS_AFFINE:
            # The code as the low mantissa bits of 128 (bfloat16) or 1024 (float16): no int-to-float cast.
            pair = pair | magic
        codes = tl.interleave(pair & 0xFFFF, (pair >> 16) & 0xFFFF)
    if KIND == "element":
        value = packed
    elif KIND == "table":
        value = tl.load(table_ptr + output[:, None] * TABLE_ROW + codes.to(tl.int32))
    elif KIND == "e4m3":
        # e4m3 bits shifted into float16: the exponent is 8 too small; subnormals stay exact.
        bits = codes.to(tl.uint16)
        bits = ((bits & 128) << 8) | ((bits & 127) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif BITS == 4 and IS_SHORT and not IS_AFFINE:
        if ZERO < 0:
            zero = tl.load(low_ptr + group * columns + output).to(tl.int32)
        else:
            zero = tl.full([output.shape[0]], ZERO, tl.int32)
        zero = ((zero | magic) & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
        value = codes.to(tl.uint16).to(TYPE, bitcast=True) - zero[:, None]
    else:
        # The code as the low mantissa bits of 2**23: no int-to-float cast.
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
def _dequantize(
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
    PIECE: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE_ROW: tl.constexpr,
):
    """Dequantize a weight to floats [outputs, inputs]. Grid: tiles of outputs, runs."""
    PIECES: tl.constexpr = 4 if BITS == 4 else 1
    WORDS: tl.constexpr = PIECE // 2 if BITS == 4 else PIECE
    tile = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, PIECE)
    within = tl.arange(0, OUTPUTS)[:, None].to(tl.int64) * code_row + tl.arange(0, WORDS)[None, :]
    packed = tl.load(code_ptr + tile * code_tile + run * code_run + within)
    for piece in tl.static_range(PIECES):
        first = (run * PIECES + piece) * PIECE
        group = group_of(run, piece, PIECES, PIECE, GROUP)
        value = dequantize_tile(
            packed,
            piece,
            0,
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
            tl.float32,
        ).to(tl.float32)
        if not IS_AFFINE:
            scale = scale_of(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
            value = value * scale[:, None]
        place = output[:, None] * (num_runs * PIECES * PIECE) + first + lanes[None, :]
        out = value.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, out, mask=(output < num_outputs)[:, None])


def dequantize(weight: TritonPackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a weight to [out, in], columns in the stored order."""
    shape = (weight.out_features, weight.in_features)
    out = torch.empty(shape, dtype=dtype, device=weight.codes.device)
    _dequantize[(weight.padded // OUTPUTS, weight.num_runs)](
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


def pointers(weight: TritonPackedWeight) -> list[torch.Tensor]:
    """Kernel pointers: scales, minimums and table; placeholders for what the weight lacks."""
    parts = (weight.outer_scales, weight.lows, weight.outer_lows, weight.table)
    return [weight.scales, *(weight.scales if part is None else part for part in parts)]


def strides(weight: TritonPackedWeight, outputs: int) -> tuple[int, int, int]:
    """Strides of the codes between tiles of `outputs`, between runs, and between outputs."""
    if weight.is_packed:
        return weight.codes.stride(0), weight.codes.stride(1), weight.codes.stride(2)
    row = weight.codes.stride(0)
    return outputs * row, weight.piece, row


def constants(weight: TritonPackedWeight) -> dict[str, Any]:
    """Compile-time constants of the kernels."""
    return {
        "PIECE": weight.piece,
        "BITS": 4 if weight.is_packed else 8,
        "KIND": weight.kind,
        "GROUP": weight.group,
        "ZERO": weight.zero,
        "IS_AFFINE": weight.is_affine,
        "NESTED": weight.nested,
        "TABLE_ROW": 0 if weight.table is None or len(weight.table) == 1 else weight.table.shape[1],
    }
