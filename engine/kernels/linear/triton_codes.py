# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""Decoding of trellis and E8P codes in Triton, from words to values of the matrix instructions' operand.

A word tensor is `[ROWS, LANES]` 32-bit words; the words of one lane hold 16 inputs of two outputs (halves).
A piece is one input of each lane: `[ROWS, LANES]` values, decoded by shifts that are known when the kernel is
compiled, so that a tile of codes never changes the thread that decodes it.

Trellis: a state is a window of 16 bits, cut from two neighbouring words, and a multiplication makes it a
value (`quant/kinds/trellis/viterbi.py`). E8P: a code becomes a word of eight nibbles `u`, `(2u - 15) / 4` the
values: the pattern's from a table, turned over by signs that are spread over nibbles. Its numbers are exact
in 16 bits, and scaled afterwards.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ....quant.kinds.e8p.kind import DIM, SIGN_BITS, patterns, residual_points
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
_GATHER: tl.constexpr = tl.constexpr(
    "{ .reg .b64 at; mad.wide.u32 at, $1, 4, $2; ld.global.nc.b32 $0, [at]; }"
)


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


@triton.jit
def gather(ptr, base, index, ASM: tl.constexpr):
    """Look words up in the table at `ptr`, which is at the addresses `base` as well.

    Triton's load would go by way of the codes' buffers in shared memory, and take their stages; and a pointer
    from outside of the loop would keep codes from being decoded in the layout of the tensor core's operand.
    """
    if ASM:
        return tl.inline_asm_elementwise(_GATHER, "=r,r,l", [index, base], tl.int32, True, 1)
    return tl.load(ptr + index)


@triton.jit
def _nibbles(code, table_ptr, base, ASM: tl.constexpr):
    """A code of E8P, 16 bits, as eight nibbles `u`."""
    signs = code & 0xFF
    folded = (signs ^ (signs >> 4)) & 15
    odd = (0x6996 >> folded) & 1  # the parity of every number of four bits
    # One bit a nibble, at its end.
    spread = signs ^ odd
    spread = (spread | (spread << 12)) & 0x000F000F
    spread = (spread | (spread << 6)) & 0x03030303
    spread = (spread | (spread << 3)) & 0x11111111
    pattern = gather(table_ptr, base, (code >> 8) & 0xFF, ASM)
    return (pattern ^ (spread * 15)) + (spread - odd * 0x11111111)


@triton.jit
def e8p_words(
    ptr, within, table_ptr, base, BITS: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr
):
    """Nibbles of a run as a tuple of words: of the two codes of each half, then of their residuals."""
    words = ()
    for number in tl.static_range(2):
        codes = tl.load(ptr + number * WORDS + within)
        one = _nibbles(codes, table_ptr, base, ASM), _nibbles(codes >> 16, table_ptr, base, ASM)
        words = words + one
    if BITS == 3:
        indices = tl.load(ptr + 2 * WORDS + within)
        for number in tl.static_range(4):
            index = ((indices >> (8 * number)) & 0xFF) + 256
            words = words + (gather(table_ptr, base, index, ASM),)  # noqa: RUF005
    if BITS == 4:
        for number in tl.static_range(2):
            codes = tl.load(ptr + (2 + number) * WORDS + within)
            one = _nibbles(codes, table_ptr, base, ASM), _nibbles(codes >> 16, table_ptr, base, ASM)
            words = words + one
    return words


@triton.jit
def e8p_value(
    words, first, piece, half, BASE: tl.constexpr, MAGIC: tl.constexpr, TYPE: tl.constexpr
):
    """Four times the values of a piece of one half, whole numbers `2 nibble - BASE`.

    MAGIC: as of `linear/triton_dequantize.py`: two nibbles of a word become 16-bit floats without a cast.
    """
    shift: tl.constexpr = piece % 8 // 2 * 4
    word = words[first + 2 * half + piece // 8]
    pair = (word << 1) if shift == 0 else (word >> (shift - 1))
    pair = pair & 0x001E001E
    if MAGIC > 0:
        pair = pair | MAGIC
    bits = (pair & 0xFFFF) if piece % 2 == 0 else ((pair >> 16) & 0xFFFF)
    if MAGIC > 0:
        unit: tl.constexpr = 128.0 if MAGIC == 0x43004300 else 1024.0
        value = bits.to(tl.uint16).to(TYPE, bitcast=True)
        value = value - tl.full(bits.shape, unit + BASE, tl.float32).to(TYPE)
    else:
        value = (bits - BASE).to(TYPE)
    return value


def trellis_places(in_features: int) -> torch.Tensor:
    """Where a transformed input goes, so that each piece's are side by side: int32 `[in]`."""
    channel = torch.arange(in_features)
    within = channel % LANES
    piece = within % 8 // 2 * 4 + within // 8 * 2 + within % 2
    return _placed(channel, piece)


def e8p_places(in_features: int) -> torch.Tensor:
    """`trellis_places` for E8P: a channel's nibble is that of its sign's bit."""
    channel = torch.arange(in_features)
    nibble = torch.tensor(SIGN_BITS)[channel % DIM]
    piece = channel % LANES // DIM * DIM + nibble % 4 * 2 + nibble // 4
    return _placed(channel, piece)


def _placed(channel: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    run = LANES * LANES
    return (channel // run * run + piece * LANES + channel % run // LANES).to(torch.int32)


@lru_cache
def e8p_table(device: torch.device) -> torch.Tensor:
    """Nibbles int32 `[512]`: of the 256 patterns without signs or shift, then of the residual of 3 bits."""
    magnitudes = patterns().clone()
    magnitudes[:, DIM - 1] *= 1 - 2 * (magnitudes.sum(dim=1) % 2)
    nibbles = torch.cat([magnitudes, residual_points()]).mul(2).add(8).long()
    words = (nibbles << torch.tensor(SIGN_BITS) * 4).sum(dim=1)
    return words.to(torch.int64).sub(words >> 31 << 32).to(torch.int32).to(device)
