# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""Dequantization of packed weights in Triton: of a tile in registers, and of a whole weight.

Packed 4-bit codes have PTX, two 16-bit values of a register at once, which Triton has no operation for: texts
for `tl.inline_asm_elementwise` with two elements a call (`pack=2`). Triton's interpreter has no assembler:
there the same values come from plain operations, and a test runs these texts in Python instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.devices import or_unread
from .triton_packed_weight import OUTPUTS, TritonPackedWeight

HAS_PTX = not knobs.runtime.interpret and torch.version.hip is None
"""True if kernels are compiled for a GPU that takes PTX, not interpreted."""

LOOKUP_REGISTERS = ",".join(["=r"] * 8 + ["r"] * 2)
"""Constraints of `lookup_ptx`."""


@triton.constexpr_function
def nibble_ptx(piece: int, magic: int) -> str:
    """`$0`: the 4-bit codes at bit `4 * piece` of either half of `$1`, or'ed into `magic`."""
    taken = f"lop3.b32 $0, t, 0x000F000F, {magic:#010x}, 0xEA;"  # (t & mask) | magic
    return f"{{ .reg .b32 t; shr.u32 t, $1, {4 * piece}; {taken} }}"


@cache
def lookup_ptx(entries: Sequence[int]) -> str:
    """Table lookup in registers by byte permutes (PRMT): `$8` and `$9` are words of eight 4-bit codes each.

    `$0` to `$3` are the entries (16 bits each) of the codes at bits 0, 4, 8 and 12 of both words, `$4` to
    `$7` at bits 16 to 28: the first word's in the lower half. Four codes are a permute's selector among eight
    bytes; low and high bytes come from four registers each, and a third permute takes the half of the table
    by a code's highest bit.
    """
    lows, highs = _pools([entry & 255 for entry in entries]), _pools([e >> 8 for e in entries])
    lines = [
        ".reg .b32 t, e, o, s, m, l, h, u;",
        # Codes of both words side by side: those at even places in e, at odd ones in o.
        "shl.b32 t, $9, 4;",
        "lop3.b32 e, $8, t, 0x0F0F0F0F, 0xE4;",  # where the mask is set the first, else the second
        "shr.u32 t, $8, 4;",
        "lop3.b32 o, t, $9, 0x0F0F0F0F, 0xE4;",
    ]
    for first, codes in enumerate("eo"):
        lines += [
            f"and.b32 s, {codes}, 0x77777777;",
            f"shr.u32 t, {codes}, 1;",
            "lop3.b32 m, t, 0x44444444, 0x32103210, 0xEA;",
        ]
        for out in (first, first + 4):
            lines += [*_bytes("l", lows), *_bytes("h", highs)]
            lines += [f"prmt.b32 ${out}, l, h, 0x5140;", f"prmt.b32 ${out + 2}, l, h, 0x7362;"]
            if out < 4:
                lines += ["shr.u32 s, s, 16;", "shr.u32 m, m, 16;"]
    return "{ " + " ".join(lines) + " }"


def _pools(values: Sequence[int]) -> list[str]:
    words = (values[at : at + 4] for at in range(0, 16, 4))
    return [f"{int.from_bytes(bytes(word), 'little'):#010x}" for word in words]


def _bytes(name: str, pools: Sequence[str]) -> list[str]:
    """Lines that select four bytes by the selectors s, in the half of the table by m."""
    lines = [f"prmt.b32 {name}, {pools[0]}, {pools[1]}, s;"]
    if pools[2:] != pools[:2]:
        lines.append(f"prmt.b32 u, {pools[2]}, {pools[3]}, s;")
        lines.append(f"prmt.b32 {name}, {name}, u, m;")
    return lines


@triton.jit
def scale_of(ptr, outer_ptr, group, output, columns, GRID: tl.constexpr):
    """Scales, or minimums (offsets), of a group: float32 `[OUTPUTS]`."""
    scale = tl.load(ptr + group * columns + output).to(tl.float32)
    if GRID.nested > 0:
        scale *= tl.load(outer_ptr + (group // GRID.nested) * columns + output).to(tl.float32)
    return scale


@triton.jit
def group_of(run, piece, GRID: tl.constexpr):
    """The group of a piece, in a form that lets the compiler merge loads where a run spans whole groups."""
    RUN: tl.constexpr = GRID.pieces * GRID.piece
    if GRID.group == 0:
        group = run * 0
    elif RUN % GRID.group == 0:
        group = run * (RUN // GRID.group) + piece * GRID.piece // GRID.group
    else:
        group = (run * GRID.pieces + piece) * GRID.piece // GRID.group
    return group


@triton.jit
def unpack(packed, piece):
    """The two codes of a piece that each word has: int32, 4 bits each."""
    pair = (packed >> (piece * 4)) & 0x000F000F
    return pair & 0xFFFF, (pair >> 16) & 0xFFFF


@triton.jit
def unpack_short(halves, piece: tl.constexpr, MAGIC: tl.constexpr, PTX: tl.constexpr):
    """The code of a piece that each half of a word (int16) has, or'ed into MAGIC: uint16. It becomes the low
    mantissa bits of 128 (bfloat16) or 1024 (float16): no cast from integers is needed."""
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
    GRID: tl.constexpr,
    KIND: tl.constexpr,
    MAGIC: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Dequantize codes `[OUTPUTS, inputs]` for a matmul in TYPE; unscaled, unless the grid is affine.

    Nothing here but loads and constants may come from outside a loop over codes: only then does the compiler
    load the codes in the layout of the tensor core's operand, where they are decoded in place.

    Args:
        codes: codes, with MAGIC in them where it is not 0.
        scale, low: `[OUTPUTS]`, of the group: `low` is the zero point, or the minimum of an affine grid.
        KIND: kind of the grid; "element" where the codes are looked up already.
    """
    if KIND == "element":
        value = codes
    elif KIND == "table":
        value = tl.load(table_ptr + codes.to(tl.int32))
    elif KIND == "e4m3":
        # e4m3 bits shifted into float16: the exponent is 8 too small; subnormals stay exact.
        bits = codes.to(tl.uint16)
        bits = ((bits & 128) << 8) | ((bits & 127) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif MAGIC > 0:
        value = codes.to(TYPE, bitcast=True)
        if GRID.zero < 0:
            zero = (low | (MAGIC & 0xFFFF)).to(tl.uint16).to(TYPE, bitcast=True)
            value = value - zero[:, None]
        else:
            unit: tl.constexpr = 128.0 if MAGIC == 0x43004300 else 1024.0
            value = value - tl.full(codes.shape, unit + GRID.zero, tl.float32).to(TYPE)
    else:
        # The code as the low mantissa bits of 2**23: no int-to-float cast.
        value = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        if GRID.is_affine:
            value = (value - 8388608.0) * scale[:, None] - low[:, None]
        elif GRID.zero < 0:
            value = value - (8388608.0 + low.to(tl.float32))[:, None]
        else:
            value = value - (8388608.0 + GRID.zero)
    return value


@triton.jit
def zeros_of(ptr, run, output, columns, GRID: tl.constexpr):
    """Zero points of a run of 4-bit codes: int32 `[OUTPUTS]`, as asynchronous copies take four bytes."""
    if GRID.bits == 4 and GRID.zero < 0:
        zeros = tl.load(ptr + run * columns + output)
    else:
        zeros = output * 0
    return zeros


@triton.jit
def low_of(ptr, outer_ptr, group, output, columns, GRID: tl.constexpr):
    """Minimums of an affine grid, float32, or zero points of 8-bit codes; without either an unread 0."""
    if GRID.is_affine:
        low = scale_of(ptr, outer_ptr, group, output, columns, GRID)
    elif GRID.zero < 0 and GRID.bits != 4:
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
    GRID: tl.constexpr,
):
    """Dequantize a weight to floats [outputs, inputs]. Grid: tiles of outputs, runs."""
    # Triton 3.6 passes no plain text to a function.
    KIND: tl.constexpr = GRID.kind
    PIECES: tl.constexpr = GRID.pieces
    WORDS: tl.constexpr = GRID.words
    # A word has an input of either half of a piece, or two neighbours.
    BEHIND: tl.constexpr = GRID.piece // 2 if GRID.piece >= 32 else 1
    SPACING: tl.constexpr = 1 if GRID.piece >= 32 or GRID.bits != 4 else 2
    tile = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    within = tl.arange(0, OUTPUTS)[:, None].to(tl.int64) * code_row + tl.arange(0, WORDS)[None, :]
    packed = tl.load(code_ptr + tile * code_tile + run * code_run + within)
    zeros = zeros_of(low_ptr, run, output, columns, GRID)
    for piece in tl.static_range(PIECES):
        first = (run * PIECES + piece) * GRID.piece
        group = group_of(run, piece, GRID)
        scale = scale_of(scale_ptr, outer_scale_ptr, group, output, columns, GRID)
        low = low_of(low_ptr, outer_low_ptr, group, output, columns, GRID)
        if GRID.bits == 4 and GRID.zero < 0:
            low = (zeros >> (8 * piece)) & 255
        offset = output[:, None] * (num_runs * PIECES * GRID.piece) + first
        mask = (output < num_outputs)[:, None]
        if GRID.bits == 4:
            front, back = unpack(packed, piece)
        else:
            front, back = packed, packed
        lanes = tl.arange(0, WORDS)[None, :] * SPACING
        for half in tl.static_range(2 if GRID.bits == 4 else 1):
            codes = front if half == 0 else back
            value = decode(codes, scale, low, table_ptr, GRID, KIND, 0, tl.float32).to(tl.float32)
            if not GRID.is_affine:
                value = value * scale[:, None]
            out = value.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + offset + half * BEHIND + lanes, out, mask=mask)


def dequantize(weight: TritonPackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a weight to [out, in], columns in the stored order."""
    shape = (weight.out_features, weight.in_features)
    out = torch.empty(shape, dtype=dtype, device=weight.codes.device)
    sizes = weight.out_features, weight.padded, weight.num_runs
    _dequantize[(weight.padded // OUTPUTS, weight.num_runs)](
        *(weight.codes, *pointers(weight), out, *sizes, *strides(weight, OUTPUTS)),
        OUTPUTS=OUTPUTS,
        GRID=weight.grid,
        num_warps=4,
    )
    return out


def pointers(weight: TritonPackedWeight) -> list[torch.Tensor]:
    """Kernel pointers: scales, minimums and table; placeholders for what the weight lacks."""
    parts = weight.outer_scales, weight.lows, weight.outer_lows, weight.table
    return [weight.scales, *or_unread(weight.scales, *parts)]


def strides(weight: TritonPackedWeight, outputs: int) -> tuple[int, int, int]:
    if weight.is_packed:
        return weight.codes.stride(0), weight.codes.stride(1), weight.codes.stride(2)
    row = weight.codes.stride(0)
    return outputs * row, weight.grid.piece, row
