"""A weight in tiles, as Triton's products read it, whatever its grid.

Codes of up to 4 bits lie eight to a word and tile by tile, so that a program reads a tile at once. A run of
inputs is four pieces, of which a word has two neighbours each, in its two halves: a shift and a mask make the
pair, already where 16-bit floats have their last bits. Wider codes and floats lie row by row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.nn import functional

from ....quant.base.scheme import (
    PER_CHANNEL,
    CodebookScheme,
    FloatScheme,
    GgufScheme,
    IntScheme,
    LookupScheme,
    Scheme,
    VectorwiseScheme,
)
from ....quant.tensors.base import QuantizedTensor
from ....quant.tensors.fp8 import BLOCK
from ....quant.tensors.lookup import LookupTensor
from .grid import Grid, grid_of, refuses_grid

OUTPUTS = 64
"""Output channels of a tile of 4-bit codes."""
PADDED = 2 * OUTPUTS
"""Output channels that a weight is filled up to a multiple of: of codes in rows, two tiles may be one."""

PIECES = 4
"""Of a run of 4-bit codes."""

Kind = Literal["element", "code", "e4m3", "table"]


@dataclass(frozen=True, slots=True)
class TritonPackedWeight:
    """A weight `[out, in]`.

    Attributes:
        codes: int32 `[tiles, runs, OUTPUTS, piece / 2]`, eight codes each; or `[padded, in]`.
        kind: what a code is: the value itself (int8, e4m3 or a wider float), a whole number, the bits of an
            e4m3 float, or a place in `table`.
        piece: inputs of one group that a program reads at a time.
        scales: `[groups, padded]`, floats; or int8, of `outer_scales`.
        group: inputs that share a scale; 0 is all of them.
        zero: the code of zero if all share it, else -1, and `lows [groups, padded]` has it.
        is_affine: whether `lows` are taken off after scaling, not before.
        outer_scales, outer_lows: `[groups / nested, padded]`, where scales and lows are int8.
        table: float32 `[1, 16]`, or `[padded, codes]` with one for every output.
        order: int64 `[in]`, the input that each column belongs to; None in order.
        num_parts: weights of one shape that lie one behind the other.
    """

    codes: torch.Tensor
    out_features: int
    in_features: int
    kind: Kind
    piece: int
    scales: torch.Tensor
    group: int = 0
    zero: int = 0
    is_affine: bool = False
    lows: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_lows: torch.Tensor | None = None
    nested: int = 0
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    num_parts: int = 1

    @property
    def is_packed(self) -> bool:
        """Whether codes lie eight to a word."""
        return self.codes.dim() == 4

    @property
    def num_runs(self) -> int:
        """Runs of inputs that a program reads one after the other."""
        return self.in_features // (self.piece * (PIECES if self.is_packed else 1))

    @property
    def padded(self) -> int:
        """Outputs of all parts, with those that fill each up."""
        return self.scales.shape[1]

    @property
    def part_outputs(self) -> int:
        """Outputs of one part, with those that fill it up."""
        return self.padded // self.num_parts

    @property
    def weight_bytes(self) -> int:
        """Bytes that one product reads of it."""
        parts = (self.codes, self.scales, self.lows, self.outer_scales, self.outer_lows, self.table)
        return sum(part.nbytes for part in parts if part is not None)


def piece_of(in_features: int, group: int, bits: int, most: int = 64) -> int | None:
    """Inputs of one group (0: all are of one) that are read at a time, as many as fit; None: too few do.

    `most`: for what is not 8 bits wide; where values are looked up, more take too many registers.
    """
    run, most = PIECES if bits <= 4 else 1, 128 if bits == 8 else most
    sizes = (size for size in (128, 64, 32, 16) if size <= most)
    return next((n for n in sizes if not group % n and not in_features % (run * n)), None)


def refuses_packing(scheme: Scheme, in_features: int) -> str | None:
    """Why weights of a scheme have no tiles; None if they have."""
    if isinstance(scheme, LookupScheme):
        if scheme.sparse_fraction:
            return "it has no sparse weights beside the codes"
    elif (reason := refuses_grid(scheme, in_features)) is not None:
        return reason
    group, bits = scale_group(scheme), scheme.bits
    if piece_of(in_features, group, bits) is None:
        wanted = 64 if bits <= 4 else 16
        return f"it wants rows of a multiple of {wanted} inputs, in groups of 16, not {in_features}"
    return None


def scale_group(scheme: Scheme) -> int:
    """Inputs that share a scale; 0: all."""
    if isinstance(scheme, IntScheme):
        return 0 if scheme.group_size == PER_CHANNEL else scheme.group_size
    if isinstance(scheme, CodebookScheme):
        return scheme.block_size
    if isinstance(scheme, FloatScheme):
        return BLOCK if scheme.granularity == "block" else 0
    if isinstance(scheme, GgufScheme):
        return 16 if scheme.type == "Q6_K" else 32
    assert isinstance(scheme, LookupScheme | VectorwiseScheme)
    return 0


def pack_weight(
    weight: QuantizedTensor, elements: Collection[torch.dtype]
) -> TritonPackedWeight | None:
    """The tiles of a weight whose scheme `refuses_packing` does not refuse.

    `elements` are those of int8 and e4m3 that need not be decoded, because the GPU or the product takes them.
    None for the rare weight that is not as its scheme promises: unequal groups of a permuted one.
    """
    if isinstance(weight, LookupTensor):
        ones = weight.table.new_ones(weight.out_features, 1)
        grid = Grid(weight.codes, weight.scheme.bits, PER_CHANNEL, ones, table=weight.table)
    else:
        found = grid_of(weight)
        if found is None:
            return None
        grid = found
    out, inputs = grid.codes.shape
    group = 0 if grid.group in (PER_CHANNEL, inputs) else grid.group
    piece = piece_of(inputs, group, grid.bits, 64 if grid.table is None else 32)
    assert piece is not None
    short = -out % PADDED

    def columns(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else functional.pad(part, (0, 0, 0, short)).T.contiguous()

    scales = columns(_narrow(grid.scales))
    assert scales is not None
    offsets, table, zero, is_affine = grid.offsets, grid.table, grid.base, False
    if offsets is not None:
        is_affine = offsets.dtype is not torch.uint8
        zero = 0 if is_affine else -1
    kind, codes = _elements(grid, elements)
    if table is not None:
        table = table.to(codes.device, torch.float32).view(-1, table.shape[-1])
        table = functional.pad(table, (0, 0, 0, short)) if len(table) > 1 else table
    codes = torch.cat([codes, codes.new_zeros(short, inputs)]) if short else codes
    return TritonPackedWeight(
        _packed(codes, piece) if grid.bits <= 4 else codes.contiguous(),
        out,
        inputs,
        kind,
        piece,
        scales,
        group,
        zero,
        is_affine,
        columns(offsets),
        columns(grid.outer_scales),
        columns(grid.outer_offsets),
        grid.nested,
        table,
        grid.order,
    )


def pack_float_weight(weight: torch.Tensor) -> TritonPackedWeight | None:
    """The tiles of a plain weight [out, in]; None: its rows are no multiple of 16."""
    out, inputs = weight.shape
    if (piece := piece_of(inputs, 0, 16)) is None:
        return None
    codes = functional.pad(weight, (0, 0, 0, -out % PADDED))
    return TritonPackedWeight(
        codes.contiguous(), out, inputs, "element", piece, codes.new_ones(1, len(codes))
    )


def stack_packed_weights(weights: Sequence[TritonPackedWeight]) -> TritonPackedWeight | None:
    """Weights of one shape as the parts of one; None: they are of different kinds."""
    if len({weight.codes.dtype for weight in weights}) > 1:
        return None
    joined: dict[str, Any] = {"num_parts": len(weights)}
    for field in fields(TritonPackedWeight):
        values = [getattr(weight, field.name) for weight in weights]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not tensors:
            if any(value != values[0] for value in values):
                return None
        elif field.name == "order" or len(tensors) < len(values) or not _are_alike(tensors):
            return None
        elif field.name == "codes":
            joined["codes"] = torch.cat(tensors)
        elif field.name != "table":
            joined[field.name] = torch.cat(tensors, dim=1)
        elif len(tensors[0]) > 1:
            joined["table"] = torch.cat(tensors)
    return replace(weights[0], **joined)


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def _elements(grid: Grid, elements: Collection[torch.dtype]) -> tuple[Kind, torch.Tensor]:
    """What the codes are, `[out, in]`."""
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
    """Eight codes to a word: of piece p the two neighbours lie in bits 4p and 4p + 16."""
    runs = codes.shape[1] // (PIECES * piece)
    tiles = codes.view(-1, OUTPUTS, runs, PIECES, piece // 2, 2).permute(0, 2, 1, 4, 5, 3)
    # Two codes make a byte, and four bytes a word, the lowest first.
    low, high = tiles[..., 0::2], tiles[..., 1::2]
    return (low | (high << 4)).flatten(-2).contiguous().view(torch.int32).squeeze(-1)


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """Scales in bfloat16 if that changes none of them."""
    if scales.dtype is not torch.float32:
        return scales
    short = scales.to(torch.bfloat16)
    return short if torch.equal(short.to(torch.float32), scales) else scales
