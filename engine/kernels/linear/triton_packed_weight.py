"""Packed weights of the Triton GEMM: one layout for all grids.

Codes of up to 4 bits are packed eight per 32-bit word, tile by tile. A run (K tile) of inputs is four pieces;
a word has an input of either half of each piece, one in either half of its bits: a shift and a mask extract
both, at the low mantissa bits of two 16-bit floats. No code so changes the thread that decodes it. In pieces
of 16 a word has two neighbours of each. Wider codes and floats are stored row by row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from ....quant.base.scheme import PER_CHANNEL, Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from .grid import CodeGrid, grid_of, refuses_grid

OUTPUTS = 64
"""Output channels of a tile of 4-bit codes."""
PADDED = 2 * OUTPUTS
"""Output channels are padded to a multiple of this: row-wise codes may be read two tiles at a time."""

PIECES = 4
"""Pieces per run of 4-bit codes."""

Kind = Literal["element", "code", "e4m3", "table"]


class PackedGrid(NamedTuple):
    """Compile-time part of a packed weight.

    Attributes:
        kind: type of a code: the element itself (int8, e4m3 or a wider float), an integer code, the bits of
            an e4m3 float, or an index into the weight's table.
        bits: 4 for packed codes, 8 for those row by row.
        piece: inputs of one group that a program reads at a time.
        group: group size: inputs that share a scale; 0: all of them (per channel).
        zero: the zero point if all groups share it, else -1, and the weight's `lows` have it.
        is_affine: True if `lows` are minimums (offsets) subtracted after scaling, not zero points before.
        nested: groups that share an outer scale.
    """

    kind: Kind
    bits: int
    piece: int
    group: int = 0
    zero: int = 0
    is_affine: bool = False
    nested: int = 0

    @property
    def pieces(self) -> int:
        return PIECES if self.bits == 4 else 1

    @property
    def words(self) -> int:
        return self.piece // 2 if self.bits == 4 else self.piece

    @property
    def has_halves(self) -> bool:
        return self.bits == 4 and has_halves(self.piece)


@dataclass(frozen=True, slots=True)
class TritonPackedWeight:
    """A packed weight `[out, in]`.

    Attributes:
        codes: int32 `[tiles, runs, OUTPUTS, piece / 2]`, eight codes each; or `[padded, in]`.
        scales: `[groups, padded]`, floats; or int8, in units of `outer_scales`.
        lows: `[groups, padded]`, minimums or zero points; zero points of packed codes are int32
            `[runs, padded]`, a byte for each piece.
        outer_scales, outer_lows: `[groups / nested, padded]`, where scales and lows are int8.
        num_parts: stacked weights of one shape (the experts of a grouped GEMM).
        entries: the bits of a table of 16-bit floats, for a lookup in registers.
    """

    codes: torch.Tensor
    out_features: int
    in_features: int
    grid: PackedGrid
    scales: torch.Tensor
    lows: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_lows: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    num_parts: int = 1
    entries: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        return self.grid.bits == 4

    @property
    def has_short_codes(self) -> bool:
        """True if codes less their zero point are exact in 16-bit floats, and scaled afterwards."""
        return self.is_packed and self.grid.kind == "code" and not self.grid.is_affine

    @property
    def num_runs(self) -> int:
        return self.in_features // (self.grid.piece * self.grid.pieces)

    @property
    def padded(self) -> int:
        return self.scales.shape[1]

    @property
    def part_outputs(self) -> int:
        return self.padded // self.num_parts

    @property
    def weight_bytes(self) -> int:
        parts = (self.codes, self.scales, self.lows, self.outer_scales, self.outer_lows, self.table)
        return sum(part.nbytes for part in parts if part is not None)

    def with_table_in(self, dtype: torch.dtype) -> TritonPackedWeight:
        """The weight for a GEMM of that dtype, with its lookup table in it, to which the GEMM rounds it.
        Entries of 16 bits are too short for asynchronous copies, so a lookup goes to registers and not by way
        of a buffer in shared memory, whose stages the codes would go without."""
        if self.table is None:
            return self
        table, entries = self.table.to(dtype), ()
        if table.element_size() == 2:
            entries = tuple(value & 0xFFFF for value in table.view(torch.int16).tolist())
        return replace(self, table=table, entries=entries)


def has_halves(piece: int) -> bool:
    """True if a word has an input of either half of a piece, not two neighbours."""
    return piece >= 32


def piece_of(in_features: int, group: int, bits: int, most: int = 64) -> int | None:
    """Largest piece (inputs of one group read at a time) for a shape; `group` 0 is per channel; or None."""
    run, most = PIECES if bits <= 4 else 1, 128 if bits == 8 else most
    sizes = (size for size in (128, 64, 32, 16) if size <= most)
    return next((n for n in sizes if not group % n and not in_features % (run * n)), None)


def refuses_packing(scheme: Scheme, in_features: int) -> str | None:
    if (reason := refuses_grid(scheme, in_features)) is not None:
        return reason
    group, bits = scheme.scale_group, scheme.bits
    if group not in (0, 16, in_features) and group % 32:
        return f"it has no groups of {group} input channels (16 or multiples of 32)"
    if piece_of(in_features, group, bits) is None:
        needed = 64 if bits <= 4 else 16
        return f"it needs rows of a multiple of {needed} inputs, in groups of 16, not {in_features}"
    return None


def pack_weight(
    weight: QuantizedTensor, elements: Collection[torch.dtype]
) -> TritonPackedWeight | None:
    """Pack a weight; None for unequal groups. `elements`: int8, e4m3 that the GPU multiplies undecoded."""
    grid = grid_of(weight)
    if grid is None:
        return None
    out, inputs = grid.shape
    group = 0 if grid.group in (PER_CHANNEL, inputs) else grid.group
    piece = piece_of(inputs, group, grid.bits, 64 if grid.table is None else 32)
    assert piece is not None
    short = -out % PADDED

    def columns(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else functional.pad(part, (0, 0, 0, short)).T.contiguous()

    scales = grid.scales
    if scales.dtype is torch.float32:  # bfloat16 if that is lossless
        short_scales = scales.to(torch.bfloat16)
        scales = short_scales if torch.equal(short_scales.to(torch.float32), scales) else scales
    scales = columns(scales)
    assert scales is not None
    offsets, table, zero, is_affine = grid.offsets, grid.table, grid.base, False
    if offsets is not None:
        is_affine = offsets.dtype is not torch.uint8
        zero = 0 if is_affine else -1
    kind, codes = _elements(grid, elements)
    if table is not None:
        table = table.to(codes.device, torch.float32)
    codes = torch.cat([codes, codes.new_zeros(short, inputs)]) if short else codes
    lows = columns(offsets)
    if lows is not None and zero < 0 and grid.bits <= 4:
        # Zero points as int32 `[runs, padded]`: a byte for each piece of a run.
        pieces = torch.arange(inputs // piece, device=lows.device)
        of_pieces = lows[pieces // (group // piece) if group else pieces * 0]
        by_run = of_pieces.view(-1, PIECES, lows.shape[1]).permute(0, 2, 1)
        lows = by_run.contiguous().view(torch.int32).squeeze(-1)
    packed, bits = (_packed(codes, piece), 4) if grid.bits <= 4 else (codes.contiguous(), 8)
    outer = columns(grid.outer_scales), columns(grid.outer_offsets)
    form = PackedGrid(kind, bits, piece, group, zero, is_affine, grid.nested)
    return TritonPackedWeight(packed, out, inputs, form, scales, lows, *outer, table, grid.order)


def pack_float_weight(weight: torch.Tensor) -> TritonPackedWeight | None:
    """Pack an unquantized weight [out, in]; None: its rows are no multiple of 16."""
    out, inputs = weight.shape
    if (piece := piece_of(inputs, 0, 16)) is None:
        return None
    codes = functional.pad(weight, (0, 0, 0, -out % PADDED)).contiguous()
    form, ones = PackedGrid("element", 8, piece), codes.new_ones(1, len(codes))
    return TritonPackedWeight(codes, out, inputs, form, ones)


def stack_packed_weights(weights: Sequence[TritonPackedWeight]) -> TritonPackedWeight | None:
    """Stack weights of one shape for a grouped GEMM; None: their kinds or layouts differ."""
    if len({weight.codes.dtype for weight in weights}) > 1:
        return None
    stacked: dict[str, Any] = {"num_parts": len(weights)}
    for field in fields(TritonPackedWeight):
        values = [getattr(weight, field.name) for weight in weights]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not tensors:
            if any(value != values[0] for value in values):
                return None
        elif (
            field.name == "order"
            or len(tensors) < len(values)
            or len({t.shape for t in tensors}) > 1
        ):
            return None
        elif field.name == "codes":
            stacked["codes"] = torch.cat(tensors)
        elif field.name != "table":  # which all share
            stacked[field.name] = torch.cat(tensors, dim=1)
    return replace(weights[0], **stacked)


def _elements(grid: CodeGrid, elements: Collection[torch.dtype]) -> tuple[Kind, torch.Tensor]:
    if grid.table is not None:
        return "table", grid.codes
    if grid.is_fp8:
        if torch.float8_e4m3fn not in elements:
            return "e4m3", grid.codes
        return "element", grid.codes.view(torch.float8_e4m3fn)
    if torch.int8 in elements and grid.bits == 8 and grid.base == 128 and grid.offsets is None:
        return "element", (grid.codes ^ 128).view(torch.int8)
    return "code", grid.codes


def _packed(codes: torch.Tensor, piece: int) -> torch.Tensor:
    """Pack eight codes per word: the two of piece p are at bits 4p and 4p + 16."""
    runs = codes.shape[1] // (PIECES * piece)
    if has_halves(piece):
        halves = codes.view(-1, OUTPUTS, runs, PIECES, 2, piece // 2)
        tiles = halves.permute(0, 2, 1, 5, 4, 3)
    else:
        neighbours = codes.view(-1, OUTPUTS, runs, PIECES, piece // 2, 2)
        tiles = neighbours.permute(0, 2, 1, 4, 5, 3)
    # Two codes make a byte, and four bytes a word, lowest first (little-endian).
    low, high = tiles[..., 0::2], tiles[..., 1::2]
    return (low | (high << 4)).flatten(-2).contiguous().view(torch.int32).squeeze(-1)
