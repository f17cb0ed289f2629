# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""Decoding of trellis codes in Triton, from words to values of the matrix instructions' operand.

A word tensor is `[ROWS, LANES]` 32-bit words; the words of one lane hold 16 inputs of two outputs (halves).
A piece is one input of each lane: `[ROWS, LANES]` values, decoded by shifts that are known when the kernel is
compiled, so that a tile of codes never changes the thread that decodes it.

A state is a window of 16 bits, cut from two neighbouring words, and a multiplication makes it a value
(`quant/kinds/trellis/viterbi.py`).
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from ....quant.kinds.trellis.viterbi import MULTIPLIERS

ROWS = 64
"""Rows of a word tensor: the least that Hopper's matrix instruction takes from registers."""
LANES = 16
"""Columns of a word tensor: those that a matrix instruction of 16-bit operands sums over."""

_FACTOR, _OFFSET = struct.unpack("<2e", struct.pack("<2H", 0x1EEE, 0xC931))
"""In mul1 the value of a byte sum `n` is `(1024 + n) _FACTOR + _OFFSET`, which float32 holds exactly."""
# 2^23 + n is the word that a dot product of bytes leaves; float32 holds the offset behind it exactly, too.
_BEHIND_MAGIC = struct.pack(">f", _OFFSET - _FACTOR * (2**23 - 1024)).hex()
_BYTE_SUM: tl.constexpr = tl.constexpr(
    "{ .reg .b32 sum; dp4a.u32.u32 sum, $1, 0x01010101, 0x4B000000; "
    f"fma.rn.f32 $0, sum, 0f{struct.pack('>f', _FACTOR).hex()}, 0f{_BEHIND_MAGIC}; }}"
)
_SUM_FACTOR: tl.constexpr = tl.constexpr(_FACTOR)
_SUM_OFFSET: tl.constexpr = tl.constexpr(_OFFSET)
_MUL1: tl.constexpr = tl.constexpr(MULTIPLIERS["mul1"])
_MCG: tl.constexpr = tl.constexpr(MULTIPLIERS["mcg"])


@triton.jit
def trellis_words(ptr, within, before, BITS: tl.constexpr, WORDS: tl.constexpr):
    """The words of a run as a tuple, behind the last one of row `before`, where the stream comes from."""
    words = (tl.load(ptr + (BITS - 1) * WORDS + before).to(tl.uint32, bitcast=True),)
    for number in tl.static_range(BITS):
        one = tl.load(ptr + number * WORDS + within).to(tl.uint32, bitcast=True)
        words = words + (one,)  # noqa: RUF005 - a starred tuple is no Triton
    return words


@triton.jit
def trellis_value(
    words,
    piece,
    half,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """The values of a piece of one half. Four weights of each half follow one another in the stream."""
    end: tl.constexpr = (piece // 4 * 8 + half * 4 + piece % 4 + 1) * BITS
    word: tl.constexpr = (end - 1) // 32
    used: tl.constexpr = end - 32 * word
    state = words[word + 1] >> (32 - used)
    if used < 16:
        state = state | (words[word] << used)
    state = state & 0xFFFF
    if KIND == "mul1":
        product = state * _MUL1
        if ASM:
            value = tl.inline_asm_elementwise(_BYTE_SUM, "=f,r", [product], tl.float32, True, 1)
        else:
            pairs = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
            total = ((pairs + (pairs >> 16)) & 0xFFFF) + 1024
            value = total.to(tl.float32) * _SUM_FACTOR + _SUM_OFFSET
        if tl.float32 == TYPE:
            value = value.to(tl.float16)  # as the codebook rounds; 16-bit operands are rounded once
    else:
        product = state * (_MCG if KIND == "mcg" else 89226354)
        if KIND == "3inst":
            product += 64248484
        product = (product & 0x8FFF8FFF) ^ 0x3B603B60
        low = (product & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (product >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        value = low + high
    return value.to(TYPE)


def trellis_places(in_features: int) -> torch.Tensor:
    """Where a transformed input goes, so that each piece's are side by side: int32 `[in]`."""
    channel = torch.arange(in_features)
    within = channel % LANES
    piece = within % 8 // 2 * 4 + within // 8 * 2 + within % 2
    run = LANES * LANES
    return (channel // run * run + piece * LANES + channel % run // LANES).to(torch.int32)
