# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
"""Dequantization of packed weights in Triton: of a tile in registers, and of a whole weight."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..common.ptx import nibble_ptx
from .triton_packed_weight import OUTPUTS, TritonPackedWeight


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
def unpack(packed, piece):
    """The two codes of a piece that each word has: int32, 4 bits each."""
    pair = (packed >> (piece * 4)) & 0x000F000F
    return pair & 0xFFFF, (pair >> 16) & 0xFFFF


@triton.jit
def unpack_short(halves, piece: tl.constexpr, MAGIC: tl.constexpr, PTX: tl.constexpr):
    """The code of a piece that each half of a word (int16) has, or'ed into MAGIC: uint16.

    It becomes the low mantissa bits of 128 (bfloat16) or 1024 (float16), so that no cast from integers is
    needed. Of two halves in a register at once: a shift, and a logical operation of three inputs.
    """
    if PTX:
        codes = tl.inline_asm_elementwise(
            nibble_ptx(piece, MAGIC), "=r,r", [halves], dtype=tl.uint16, is_pure=True, pack=2
        )
    else:
        codes = ((halves.to(tl.uint16) >> (piece * 4)) & 15) | (MAGIC & 0xFFFF)
    return codes.to(tl.uint16)


@triton.jit
def look_up(packed, TABLE_PTX: tl.constexpr, REGISTERS: tl.constexpr):
    """The entries of all codes of a word, as uint16: of its lower half, then of its upper half."""
    return tl.inline_asm_elementwise(
        TABLE_PTX,
        REGISTERS,
        [packed],
        dtype=(
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
        ),
        is_pure=True,
        pack=2,
    )


@triton.jit
def decode(
    codes,
    scale,
    low,
    table_ptr,
    output,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    MAGIC: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Dequantize codes `[OUTPUTS, inputs]` for a matmul in TYPE; unscaled, unless the grid is affine.

    Nothing here but loads and constants may come from outside a loop over codes: only then does the compiler
    load the codes in the layout of the tensor core's operand, where they are decoded in place.

    Args:
        codes: with MAGIC in them, where it is not 0.
        scale, low: `[OUTPUTS]`, of the group: `low` is the zero point, or the minimum of an affine grid.
    """
    if KIND == "element":
        value = codes
    elif KIND == "table":
        value = tl.load(table_ptr + output[:, None] * TABLE_ROW + codes.to(tl.int32))
    elif KIND == "e4m3":
        # e4m3 bits shifted into float16: the exponent is 8 too small; subnormals stay exact.
        bits = codes.to(tl.uint16)
        bits = ((bits & 128) << 8) | ((bits & 127) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif MAGIC > 0:
        value = codes.to(TYPE, bitcast=True)
        if ZERO < 0:
            zero = (low | (MAGIC & 0xFFFF)).to(tl.uint16).to(TYPE, bitcast=True)
            value = value - zero[:, None]
        else:
            unit: tl.constexpr = 128.0 if MAGIC == 0x43004300 else 1024.0
            value = value - tl.full(codes.shape, unit + ZERO, tl.float32).to(TYPE)
    else:
        # The code as the low mantissa bits of 2**23: no int-to-float cast.
        value = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        if IS_AFFINE:
            value = (value - 8388608.0) * scale[:, None] - low[:, None]
        elif ZERO < 0:
            value = value - (8388608.0 + low.to(tl.float32))[:, None]
        else:
            value = value - (8388608.0 + ZERO)
    return value


@triton.jit
def zeros_of(ptr, run, output, columns, BITS: tl.constexpr, ZERO: tl.constexpr):
    """The zero points of a run of 4-bit codes: int32 `[OUTPUTS]`, a byte for each piece.

    Whole words, because asynchronous copies take no fewer than four bytes.
    """
    if BITS == 4 and ZERO < 0:
        zeros = tl.load(ptr + run * columns + output)
    else:
        zeros = output * 0
    return zeros


@triton.jit
def low_of(
    ptr,
    outer_ptr,
    group,
    output,
    columns,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Minimums of an affine grid, float32, or zero points of 8-bit codes; without either an unread 0."""
    if IS_AFFINE:
        low = scale_of(ptr, outer_ptr, group, output, columns, NESTED)
    elif ZERO < 0 and BITS != 4:
        low = tl.load(ptr + group * columns + output)
    else:
        low = output * 0
    return low


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
    # A word has an input of either half of a piece, or two neighbours.
    BEHIND: tl.constexpr = PIECE // 2 if PIECE >= 32 else 1
    SPACING: tl.constexpr = 1 if PIECE >= 32 else 2
    tile = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    within = tl.arange(0, OUTPUTS)[:, None].to(tl.int64) * code_row + tl.arange(0, WORDS)[None, :]
    packed = tl.load(code_ptr + tile * code_tile + run * code_run + within)
    zeros = zeros_of(low_ptr, run, output, columns, BITS, ZERO)
    for piece in tl.static_range(PIECES):
        first = (run * PIECES + piece) * PIECE
        group = group_of(run, piece, PIECES, PIECE, GROUP)
        scale = scale_of(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
        low = low_of(low_ptr, outer_low_ptr, group, output, columns, BITS, ZERO, IS_AFFINE, NESTED)
        if BITS == 4 and ZERO < 0:
            low = (zeros >> (8 * piece)) & 255
        place = output[:, None] * (num_runs * PIECES * PIECE) + first
        mask = (output < num_outputs)[:, None]
        if BITS == 4:
            front, back = unpack(packed, piece)
            lanes = tl.arange(0, WORDS)[None, :] * SPACING
            for half in tl.static_range(2):
                codes = front if half == 0 else back
                value = decode(
                    codes, scale, low, table_ptr, output, KIND, BITS, ZERO, IS_AFFINE,
                    TABLE_ROW, 0, tl.float32,
                ).to(tl.float32)  # fmt: skip
                if not IS_AFFINE:
                    value = value * scale[:, None]
                out = value.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + place + half * BEHIND + lanes, out, mask=mask)
        else:
            value = decode(
                packed, scale, low, table_ptr, output, KIND, BITS, ZERO, IS_AFFINE,
                TABLE_ROW, 0, tl.float32,
            ).to(tl.float32)  # fmt: skip
            if not IS_AFFINE:
                value = value * scale[:, None]
            out = value.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + place + tl.arange(0, PIECE)[None, :], out, mask=mask)


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
