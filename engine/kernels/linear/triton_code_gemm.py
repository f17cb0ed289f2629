# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""GEMM of transformed inputs with trellis codes, decoded in registers, and their dequantization.

A word tensor is `[ROWS, LANES]` 32-bit words; the words of a lane hold 16 inputs of two outputs (halves). A
piece is one input of each lane, decoded by shifts known at compile time, so that no code changes the thread
that decodes it. A state is a window of 16 bits of two neighbouring words (`quant/kinds/trellis/viterbi.py`).

A program has 128 outputs, in two halves of 64 rows, and runs of 256 inputs, in which each of 16 lanes has its
words. Runs are split over programs (split-K), by the weight alone; the outputs' transform adds the partial
sums.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ....quant.kinds.trellis.kind import TrellisTensor
from ....quant.kinds.trellis.viterbi import MULTIPLIERS, TILE
from ..common.devices import (
    FEW_ROWS,
    FEW_TOKENS,
    decode_slots,
    gpu_limits,
    power_of_two,
    split_runs,
)

_ROWS = tl.constexpr(64)
"""Rows of a word tensor: the least that Hopper's matrix instruction takes from registers."""
_LANES = tl.constexpr(16)
"""Columns of a word tensor: those that a matrix instruction of 16-bit operands sums over."""

_FACTOR, _OFFSET = struct.unpack("<2e", struct.pack("<2H", 0x1EEE, 0xC931))
"""mul1: the value of a byte sum `n` is `(1024 + n) _FACTOR + _OFFSET`, which float32 holds exactly."""
# 2^23 + n is the word that a dot product of bytes leaves; float32 holds the offset after it exactly, too.
_BEHIND_MAGIC = struct.pack(">f", _OFFSET - _FACTOR * (2**23 - 1024)).hex()
_BYTE_SUM: tl.constexpr = tl.constexpr(
    "{ .reg .b32 sum; dp4a.u32.u32 sum, $1, 0x01010101, 0x4B000000; "
    f"fma.rn.f32 $0, sum, 0f{struct.pack('>f', _FACTOR).hex()}, 0f{_BEHIND_MAGIC}; }}"
)
_SUM_FACTOR, _SUM_OFFSET = tl.constexpr(_FACTOR), tl.constexpr(_OFFSET)
_MUL1, _MCG = tl.constexpr(MULTIPLIERS["mul1"]), tl.constexpr(MULTIPLIERS["mcg"])
ROWS, LANES = _ROWS.value, _LANES.value
OUTPUTS, RUN = 2 * ROWS, LANES * LANES
"""Outputs of a tile, and inputs of a run."""


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """Codes of a weight: words int32 `[tiles, runs, bits, ROWS, LANES]`, and int32 places of inputs."""

    words: torch.Tensor
    out_features: int
    in_features: int
    kind: str
    places: torch.Tensor

    @property
    def bits(self) -> int:
        return self.words.shape[2]

    @property
    def num_runs(self) -> int:
        return self.words.shape[1]

    @property
    def padded(self) -> int:
        return self.words.shape[0] * OUTPUTS


@triton.jit
def _value(
    words,
    piece,
    half,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Values of a piece of one half. Four weights of each half follow one another in the stream."""
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
def _words_of(word_ptr, run, BITS: tl.constexpr):
    """Words of a run as a tuple, after the last word of row `before`, where the stream comes from."""
    WORDS: tl.constexpr = _ROWS * _LANES
    row = tl.arange(0, _ROWS)
    lane = tl.arange(0, _LANES)[None, :]
    ptr = word_ptr + run * (BITS * WORDS)
    within = row[:, None] * _LANES + lane
    # Eight rows of a tile are one cyclic stream.
    before = ((row & 56) | ((row + 7) & 7))[:, None] * _LANES + lane
    words = (tl.load(ptr + (BITS - 1) * WORDS + before).to(tl.uint32, bitcast=True),)
    for number in tl.static_range(BITS):
        word = tl.load(ptr + number * WORDS + within).to(tl.uint32, bitcast=True)
        words = words + (word,)  # noqa: RUF005 - a starred tuple is no Triton
    return words


@triton.jit
def _outputs_of(tile, half):
    """The outputs of a half: eight rows are the first or the last eight outputs of 16."""
    row = tl.arange(0, _ROWS)
    return tile * (2 * _ROWS) + row // 8 * 16 + half * 8 + row % 8


@triton.jit(do_not_specialize=["num_rows", "runs_per_split"])
def _code_gemm(
    x_ptr,
    word_ptr,
    sum_ptr,
    num_rows,
    num_outputs,
    num_runs,
    runs_per_split,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: tiles of outputs, splits, tiles of rows (tokens). `sum_ptr` `[splits, rows, outputs]`."""
    RUN: tl.constexpr = _LANES * _LANES
    tile = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    at_row = x_ptr + row[None, :] * (num_runs * RUN) + tl.arange(0, _LANES)[:, None]
    first = tl.full([_ROWS, ROWS], 0.0, tl.float32)
    second = tl.full([_ROWS, ROWS], 0.0, tl.float32)
    begin = split * runs_per_split
    end = tl.minimum(begin + runs_per_split, num_runs)
    for run in tl.range(begin, end, num_stages=STAGES):
        words = _words_of(word_ptr, tile * num_runs + run, BITS)
        for piece in tl.static_range(_LANES):
            x = tl.load(at_row + run * RUN + piece * _LANES, mask=is_row[None, :], other=0.0)
            value = _value(words, piece, 0, BITS, KIND, x.dtype, ASM)
            first = tl.dot(value, x, first, input_precision=PRECISION)
            value = _value(words, piece, 1, BITS, KIND, x.dtype, ASM)
            second = tl.dot(value, x, second, input_precision=PRECISION)
    at = sum_ptr + (split * num_rows + row[None, :]) * num_outputs
    for half in tl.static_range(2):
        output = _outputs_of(tile, half)
        total = first if half == 0 else second
        tl.store(at + output[:, None], total, mask=is_row[None, :])


@triton.jit
def _dequantize_codes(
    word_ptr, out_ptr, num_runs, BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr
):
    """Values `[outputs, inputs]`, inputs in the order of pieces. Grid: tiles of outputs, runs."""
    RUN: tl.constexpr = _LANES * _LANES
    tile = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    words = _words_of(word_ptr, tile * num_runs + run, BITS)
    for half in tl.static_range(2):
        output = _outputs_of(tile, half)
        at = out_ptr + output[:, None] * (num_runs * RUN) + run * RUN
        for piece in tl.static_range(_LANES):
            value = _value(words, piece, half, BITS, KIND, tl.float32, ASM)
            value = value.to(out_ptr.dtype.element_ty)
            tl.store(at + piece * _LANES + tl.arange(0, _LANES)[None, :], value)


IS_COMPILED = isinstance(_code_gemm, triton.JITFunction)
"""Triton's interpreter has no inline assembly."""


def code_gemm(x: torch.Tensor, weight: CodeTiles) -> torch.Tensor:
    """Partial sums float32 `[splits, tokens, padded]` of transformed inputs in the order of pieces."""
    tokens = len(x)
    # On compute capability 10.0 a tile of 64 tokens compiles to a program without a matrix instruction.
    most = FEW_ROWS if gpu_limits(x.device).capability // 10 == 10 else FEW_TOKENS
    rows = min(most, max(FEW_ROWS, power_of_two(tokens)))
    num_tiles = len(weight.words)
    # Programs of a decode-sized batch that the GPU holds follow from the weight alone.
    own = _ring_bytes(x, weight, FEW_ROWS, _stages(x, weight, FEW_ROWS))
    runs_per_split = split_runs(num_tiles, weight.num_runs, decode_slots(x.device, own))
    num_splits = -(-weight.num_runs // runs_per_split)
    sums = torch.empty(num_splits, tokens, weight.padded, dtype=torch.float32, device=x.device)
    sizes = tokens, weight.padded, weight.num_runs, runs_per_split
    _code_gemm[(num_tiles, num_splits, -(-tokens // rows))](
        *(x, weight.words, sums, *sizes),
        ROWS=rows,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        STAGES=_stages(x, weight, rows),
        **_constants(weight),
        num_warps=4,
    )
    return sums


def dequantize_codes(weight: CodeTiles, dtype: torch.dtype) -> torch.Tensor:
    """The values `[padded, runs * RUN]`, inputs in the order of pieces."""
    num_tiles, num_runs = weight.words.shape[:2]
    out = torch.empty(weight.padded, num_runs * RUN, dtype=dtype, device=weight.words.device)
    _dequantize_codes[(num_tiles, num_runs)](
        weight.words, out, num_runs, **_constants(weight), num_warps=4
    )
    return out


def _constants(weight: CodeTiles) -> dict[str, Any]:
    return {"BITS": weight.bits, "KIND": weight.kind, "ASM": IS_COMPILED}


def _ring_bytes(x: torch.Tensor, weight: CodeTiles, rows: int, stages: int) -> int:
    codes = 4 * ROWS * LANES * (weight.bits + 1)
    # Hopper's matrix instructions read inputs from shared memory until they are done.
    buffers = stages if gpu_limits(x.device).capability // 10 == 9 else stages - 1
    return (stages - 1) * codes + buffers * rows * RUN * x.element_size()


def _stages(x: torch.Tensor, weight: CodeTiles, rows: int) -> int:
    """Software-pipelining stages: of decode-sized tiles, that stream codes, as many as there is room for."""
    room = gpu_limits(x.device).shared_bytes
    room = room if rows <= FEW_ROWS else room * 3 // 4
    return next((n for n in (3, 2) if _ring_bytes(x, weight, rows, n) <= room), 1)


def trellis_places(in_features: int) -> torch.Tensor:
    """Where a transformed input goes, so that each piece's are side by side: int32 `[in]`."""
    channel = torch.arange(in_features)
    within = channel % LANES
    piece = within % 8 // 2 * 4 + within // 8 * 2 + within % 2
    run = LANES * LANES
    return (channel // run * run + piece * LANES + channel % run // LANES).to(torch.int32)


def trellis_tiles(weight: TrellisTensor) -> CodeTiles:
    """Repack a trellis: the words of 32 weights of a stream, 16 inputs of two outputs, are a lane's."""
    bits = weight.scheme.bits
    words = weight.trellis.contiguous().view(torch.int32)
    runs, tiles = -(-words.shape[0] // LANES), words.shape[1] * TILE // OUTPUTS
    words = functional.pad(words, (0, 0, 0, 0, 0, runs * LANES - words.shape[0]))
    words = words.view(runs, LANES, tiles, ROWS // 8, 8, bits).permute(2, 0, 5, 3, 4, 1)
    return CodeTiles(
        words.reshape(tiles, runs, bits, ROWS, LANES).contiguous(),
        *weight.shape,
        weight.scheme.codebook,
        trellis_places(weight.in_features).to(words.device),
    )
