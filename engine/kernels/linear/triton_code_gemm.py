# pyright: reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""GEMM of transformed inputs with trellis or E8P codes, decoded in registers, and their dequantization.

A program has 128 outputs, in two halves of 64 rows, and runs of 256 inputs: in a run each of 16 lanes has its
words, and 16 pieces of 16 inputs are decoded and multiplied one after the other. As in
`linear/triton_gemm.py` outputs are the rows of a tile and tokens its columns, and runs are split over
programs (split-K). The partial sums stay apart: the transform of the outputs, which reads them in any case,
adds them up. How many splits there are depends on the weight alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ....quant.kinds.e8p.kind import RESIDUAL_STEPS, E8pTensor
from ....quant.kinds.trellis.kind import TrellisTensor
from ....quant.kinds.trellis.viterbi import TILE
from ..common.devices import (
    FEW_ROWS,
    FEW_TOKENS,
    MAGIC,
    decode_slots,
    gpu_limits,
    power_of_two,
    split_runs,
)
from .triton_codes import (
    LANES,
    ROWS,
    e8p_places,
    e8p_table,
    e8p_value,
    e8p_words,
    trellis_places,
    trellis_value,
    trellis_words,
)

OUTPUTS = 2 * ROWS
"""Outputs of a tile."""
RUN = LANES * LANES
"""Inputs of a run."""


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """The codes of a weight `[out, in]`, repacked.

    Attributes:
        words: int32 `[tiles, runs, bits, ROWS, LANES]`: of 32 weights of a lane.
        kind: the codebook of a trellis, or `e8p`.
        scales: float32 `[2, padded]`, of E8P's whole numbers and of their residual's; None: of a trellis.
        table: nibbles of E8P's patterns.
        addresses: int64 `[2, ROWS]`, where the table lies (see `gather`).
        places: of transformed inputs, int32 `[in]`.
    """

    words: torch.Tensor
    out_features: int
    in_features: int
    kind: str
    places: torch.Tensor
    scales: torch.Tensor | None = None
    table: torch.Tensor | None = None
    addresses: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        return self.words.shape[2]

    @property
    def num_runs(self) -> int:
        return self.words.shape[1]

    @property
    def padded(self) -> int:
        """Outputs of all tiles."""
        return self.words.shape[0] * OUTPUTS

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.words, self.scales, self.table) if x is not None)


@triton.jit
def _words_of(
    word_ptr, table_ptr, address_ptr, run, BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr
):
    """The words of a run, as its pieces are decoded from them."""
    ROWS: tl.constexpr = 64
    LANES: tl.constexpr = 16
    WORDS: tl.constexpr = ROWS * LANES
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    ptr = word_ptr + run * (BITS * WORDS)
    within = row[:, None] * LANES + lane
    if KIND == "e8p":
        base = tl.load(address_ptr + run % 2 * ROWS + row)[:, None]
        words = e8p_words(ptr, within, table_ptr, base, BITS, WORDS, ASM)
    else:
        # Eight rows of a tile are one cyclic stream.
        before = ((row & 56) | ((row + 7) & 7))[:, None] * LANES + lane
        words = trellis_words(ptr, within, before, BITS, WORDS)
    return words


@triton.jit
def _value_of(
    words,
    piece,
    half,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    MAGIC: tl.constexpr,
    ASM: tl.constexpr,
):
    """The values of a piece of one half; E8P's without their residuals."""
    if KIND == "e8p":
        value = e8p_value(words, 0, piece, half, 15, MAGIC, TYPE)
    else:
        value = trellis_value(words, piece, half, BITS, KIND, TYPE, ASM)
    return value


@triton.jit
def _rest_of(words, piece, half, BITS: tl.constexpr, TYPE: tl.constexpr, MAGIC: tl.constexpr):
    """The residuals of a piece of one half."""
    return e8p_value(words, 4, piece, half, 16 if BITS == 3 else 15, MAGIC, TYPE)


@triton.jit
def _outputs_of(tile, half, ROWS: tl.constexpr):
    """The outputs of a half: eight rows are the first or the last eight outputs of 16."""
    row = tl.arange(0, ROWS)
    return tile * (2 * ROWS) + row // 8 * 16 + half * 8 + row % 8


@triton.jit(do_not_specialize=["num_rows", "runs_per_split"])
def _code_gemm(
    x_ptr,
    word_ptr,
    scale_ptr,
    table_ptr,
    address_ptr,
    sum_ptr,
    num_rows,
    num_outputs,
    num_runs,
    runs_per_split,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    MAGIC: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: tiles of outputs, splits, tiles of rows (tokens). `sum_ptr` `[splits, rows, outputs]`."""
    LANES: tl.constexpr = 16
    RUN: tl.constexpr = LANES * LANES
    OUTPUTS: tl.constexpr = 64
    HAS_REST: tl.constexpr = KIND == "e8p" and BITS > 2
    tile = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    at_row = x_ptr + row[None, :] * (num_runs * RUN) + tl.arange(0, LANES)[:, None]
    first = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    second = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    first_rest = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    second_rest = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    begin = split * runs_per_split
    end = tl.minimum(begin + runs_per_split, num_runs)
    for run in tl.range(begin, end, num_stages=STAGES):
        words = _words_of(word_ptr, table_ptr, address_ptr, tile * num_runs + run, BITS, KIND, ASM)
        for piece in tl.static_range(LANES):
            x = tl.load(at_row + run * RUN + piece * LANES, mask=is_row[None, :], other=0.0)
            value = _value_of(words, piece, 0, BITS, KIND, x.dtype, MAGIC, ASM)
            first = tl.dot(value, x, first, input_precision=PRECISION)
            value = _value_of(words, piece, 1, BITS, KIND, x.dtype, MAGIC, ASM)
            second = tl.dot(value, x, second, input_precision=PRECISION)
            if HAS_REST:
                value = _rest_of(words, piece, 0, BITS, x.dtype, MAGIC)
                first_rest = tl.dot(value, x, first_rest, input_precision=PRECISION)
                value = _rest_of(words, piece, 1, BITS, x.dtype, MAGIC)
                second_rest = tl.dot(value, x, second_rest, input_precision=PRECISION)
    at = sum_ptr + (split * num_rows + row[None, :]) * num_outputs
    for half in tl.static_range(2):
        output = _outputs_of(tile, half, OUTPUTS)
        total = first if half == 0 else second
        if KIND == "e8p":
            total *= tl.load(scale_ptr + output)[:, None]
        if HAS_REST:
            rest = first_rest if half == 0 else second_rest
            total += rest * tl.load(scale_ptr + num_outputs + output)[:, None]
        tl.store(at + output[:, None], total, mask=is_row[None, :])


@triton.jit
def _dequantize_codes(
    word_ptr,
    scale_ptr,
    table_ptr,
    address_ptr,
    out_ptr,
    num_outputs,
    num_runs,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
):
    """Values `[outputs, inputs]`, inputs in the order of pieces. Grid: tiles of outputs, runs."""
    ROWS: tl.constexpr = 64
    LANES: tl.constexpr = 16
    RUN: tl.constexpr = LANES * LANES
    tile = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    words = _words_of(word_ptr, table_ptr, address_ptr, tile * num_runs + run, BITS, KIND, ASM)
    for half in tl.static_range(2):
        output = _outputs_of(tile, half, ROWS)
        at = out_ptr + output[:, None] * (num_runs * RUN) + run * RUN
        for piece in tl.static_range(LANES):
            value = _value_of(words, piece, half, BITS, KIND, tl.float32, 0, ASM)
            if KIND == "e8p":
                value *= tl.load(scale_ptr + output)[:, None]
                if BITS > 2:
                    rest = _rest_of(words, piece, half, BITS, tl.float32, 0)
                    value += rest * tl.load(scale_ptr + num_outputs + output)[:, None]
            value = value.to(out_ptr.dtype.element_ty)
            tl.store(at + piece * LANES + tl.arange(0, LANES)[None, :], value)


IS_COMPILED = isinstance(_code_gemm, triton.JITFunction)
"""Triton's interpreter has no inline assembly."""


def code_gemm(x: torch.Tensor, weight: CodeTiles) -> torch.Tensor:
    """Partial sums float32 `[splits, tokens, padded]`.

    Args:
        x: transformed inputs `[tokens, runs * RUN]` in the order of pieces.
    """
    tokens = len(x)
    # On compute capability 10.0 a tile of 64 tokens compiles to a program without a matrix instruction.
    most = FEW_ROWS if gpu_limits(x.device).capability // 10 == 10 else FEW_TOKENS
    rows = min(most, max(FEW_ROWS, power_of_two(tokens)))
    num_tiles = len(weight.words)
    runs_per_split = split_runs(num_tiles, weight.num_runs, _slots(x, weight))
    num_splits = -(-weight.num_runs // runs_per_split)
    sums = torch.empty(num_splits, tokens, weight.padded, dtype=torch.float32, device=x.device)
    _code_gemm[(num_tiles, num_splits, -(-tokens // rows))](
        x,
        *_pointers(weight),
        sums,
        tokens,
        weight.padded,
        weight.num_runs,
        runs_per_split,
        ROWS=rows,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        MAGIC=MAGIC.get(x.dtype, 0),
        STAGES=_stages(x, weight, rows),
        **_constants(weight),
        num_warps=4,
    )
    return sums


def fits_tensor_memory(weight: CodeTiles) -> bool:
    """Whether `code_gemm` has room for its operands: on compute capability 10.0 those of E8P's residuals
    take 536 columns of tensor memory, of 512, and the kernel becomes a trap (`make gpu-matrix`)."""
    has_residual = weight.kind == "e8p" and weight.bits > 2
    return not (has_residual and gpu_limits(weight.words.device).capability // 10 == 10)


def dequantize_codes(weight: CodeTiles, dtype: torch.dtype) -> torch.Tensor:
    """The values `[padded, runs * RUN]`, inputs in the order of pieces."""
    num_tiles, num_runs = weight.words.shape[:2]
    out = torch.empty(weight.padded, num_runs * RUN, dtype=dtype, device=weight.words.device)
    _dequantize_codes[(num_tiles, num_runs)](
        *_pointers(weight), out, weight.padded, num_runs, **_constants(weight), num_warps=4
    )
    return out


def _pointers(weight: CodeTiles) -> list[torch.Tensor]:
    words = weight.words
    parts = weight.scales, weight.table, weight.addresses
    return [words, *(words if part is None else part for part in parts)]


def _constants(weight: CodeTiles) -> dict[str, Any]:
    return {"BITS": weight.bits, "KIND": weight.kind, "ASM": IS_COMPILED}


def _ring_bytes(x: torch.Tensor, weight: CodeTiles, rows: int, stages: int) -> int:
    """Shared memory of the software pipeline."""
    codes = 4 * ROWS * LANES * (weight.bits + (weight.kind != "e8p"))
    # Hopper's matrix instructions read inputs from shared memory until they are done.
    buffers = stages if gpu_limits(x.device).capability // 10 == 9 else stages - 1
    return (stages - 1) * (codes + 8 * ROWS) + buffers * rows * RUN * x.element_size()


def _slots(x: torch.Tensor, weight: CodeTiles) -> int:
    """Programs of a decode-sized batch that the GPU holds: they follow from the weight alone."""
    return decode_slots(x.device, _ring_bytes(x, weight, FEW_ROWS, _stages(x, weight, FEW_ROWS)))


def _stages(x: torch.Tensor, weight: CodeTiles, rows: int) -> int:
    """Software-pipelining stages: of decode-sized tiles, that stream codes, as many as there is room for."""
    room = gpu_limits(x.device).shared_bytes
    room = room if rows <= FEW_ROWS else room * 3 // 4
    return next((n for n in (3, 2) if _ring_bytes(x, weight, rows, n) <= room), 1)


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


def e8p_tiles(weight: E8pTensor) -> CodeTiles:
    """Repack E8P codes: two of each of two outputs are a lane's."""
    (out, inputs), bits, device = weight.shape, weight.scheme.bits, weight.codes.device
    tiles, runs = -(-out // OUTPUTS), -(-inputs // RUN)
    parts = [_by_lane(weight.codes, tiles, runs)]
    if weight.residual is not None:
        parts.append(_by_lane(weight.residual, tiles, runs))
    scales = weight.scale.to(torch.float32).expand(out) / 4
    steps = torch.tensor([1.0, RESIDUAL_STEPS.get(bits, 0.0)], device=device)
    table = e8p_table(device)
    return CodeTiles(
        torch.cat(parts, dim=2).contiguous(),
        out,
        inputs,
        "e8p",
        e8p_places(inputs).to(device),
        functional.pad(scales * steps[:, None], (0, tiles * OUTPUTS - out)).contiguous(),
        table,
        torch.full((2, ROWS), table.data_ptr(), device=device),
    )


def _by_lane(codes: torch.Tensor, tiles: int, runs: int) -> torch.Tensor:
    """Codes `[out, in / 8]`, of one or two bytes, as words int32 `[tiles, runs, 1 or 2, ROWS, LANES]`."""
    pad = (0, runs * 2 * LANES - codes.shape[1], 0, tiles * OUTPUTS - codes.shape[0])
    padded = functional.pad(codes, pad).view(tiles, ROWS // 8, 2, 8, runs, LANES, 2)
    ordered = padded.permute(0, 4, 1, 3, 5, 2, 6).contiguous()  # halves and their two codes inside
    words = ordered.view(tiles, runs, ROWS, LANES, 4).view(torch.int32)
    return words.permute(0, 1, 4, 2, 3)
