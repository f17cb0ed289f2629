"""Weights as kernels read them: one common form of all quantization kinds, and the table of kinds.

A grid is affine (`w = scale * code - offset` per group of input channels), a lookup table of 16 values for
4-bit codes, or e4m3 floats. Lattice codes (ggml's IQ1 to IQ3), points of 4 or 8 weights and their signs, have
a form of their own, for the C kernels. Trellis codes and points of E8P have decoders instead
(`hadamard_linear.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from ....quant.base.scheme import PER_CHANNEL, Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.codebook.kind import CodebookTensor, codebook
from ....quant.kinds.codebook.scheme import CodebookScheme
from ....quant.kinds.fp4.kind import Fp4Tensor, e2m1_table
from ....quant.kinds.fp8.kind import BLOCK, Fp8Tensor
from ....quant.kinds.ggml.k_blocks import affine_scales, q3_scales, signed_scales
from ....quant.kinds.ggml.lattice import LATTICES, lattice_fields, points
from ....quant.kinds.ggml.scheme import GgufScheme
from ....quant.kinds.ggml.small_blocks import MXFP4_VALUES, iq4_xs_scales, mxfp4_steps
from ....quant.kinds.ggml.small_blocks import table as iq4_table
from ....quant.kinds.ggml.tensor import GgufTensor, block_codes
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor


@dataclass(frozen=True, slots=True)
class CodeGrid:
    """A weight `[out, in]` as codes and dequantization parameters.

    Attributes:
        stored: the codes, uint8 `[out, in]`, or the blocks that hold them.
        group: group size: input channels that share a scale, the last group may be shorter; -1: per channel.
        scales: `[out, groups]`: float16 or float32; or int8, in units of `outer_scales`.
        base: the zero point, if all groups share it; else a code in the middle.
        offsets: `[out, groups]`: None means `base * scale`; uint8 the zero point; float16 the offset itself;
            int8 the offset in units of `outer_offsets`.
        outer_scales, outer_offsets: float16 `[out, groups / nested]`, second-level (super-block) scales.
        nested: groups that share an outer scale.
        table: float32 `[16]`, the lookup table of the codes.
        is_fp8: True if the codes are e4m3.
        order: int64, the input channel of each column of `codes` (act-order), or their number where a column
            is padding; None: not permuted.
    """

    stored: torch.Tensor | GgufTensor
    bits: int
    group: int
    scales: torch.Tensor
    base: int = 0
    offsets: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_offsets: torch.Tensor | None = None
    nested: int = 0
    table: torch.Tensor | None = None
    is_fp8: bool = False
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[0], self.stored.shape[1]

    @property
    def codes(self) -> torch.Tensor:
        """uint8 `[out, in]`; those of blocks are unpacked by every call."""
        stored = self.stored
        if isinstance(stored, torch.Tensor):
            return stored
        blocks = stored.data.reshape(-1, stored.scheme.block[1])
        return block_codes(blocks, stored.scheme.type).view(stored.shape)


# Types of ggml's blocks whose codes are whole numbers, and those whose codes index a table.
WHOLE_BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
TABLE_BLOCKS = ("IQ4_NL", "IQ4_XS", "MXFP4")


def _vectorwise(weight: VectorwiseTensor) -> CodeGrid:
    scales = weight.absmax.to(torch.float32).unsqueeze(1) / 127
    return CodeGrid(weight.codes.view(torch.uint8) ^ 128, 8, PER_CHANNEL, scales, 128)


def _codebook(weight: CodebookTensor) -> CodeGrid:
    magnitudes = weight.magnitudes().view(weight.out_features, -1)
    table = codebook(weight.scheme.kind)
    return CodeGrid(weight.codes, 4, weight.scheme.block_size, _small(magnitudes), table=table)


def _fp4(weight: Fp4Tensor) -> CodeGrid:
    scales = _small(weight.block_scales())
    return CodeGrid(weight.codes, 4, weight.scheme.block_size, scales, table=e2m1_table())


def _integer(weight: IntTensor) -> CodeGrid | None:
    scheme, codes, order = weight.scheme, weight.codes, None
    group = PER_CHANNEL if scheme.group_size == weight.in_features else scheme.group_size
    if weight.group_index is not None:
        counts = torch.bincount(weight.group_index, minlength=weight.num_groups)
        if bool((counts != weight.in_features // weight.num_groups).any()):
            return None
        order = weight.group_index.argsort(stable=True)
        codes = codes.index_select(1, order)
    base, offsets = scheme.middle, None
    if bool((weight.zeros == weight.zeros[0, 0]).all()):
        base = int(weight.zeros[0, 0])
    else:
        offsets = weight.zeros
    return CodeGrid(codes, scheme.bits, group, _small(weight.scales), base, offsets, order=order)


def _fp8(weight: Fp8Tensor) -> CodeGrid:
    scales, group = weight.scales.to(torch.float32), PER_CHANNEL
    if weight.scheme.granularity == "block":
        scales = scales.repeat_interleave(BLOCK, 0)[: weight.out_features]
        group = BLOCK
    scales = scales.expand(weight.out_features, -1)
    return CodeGrid(weight.values.view(torch.uint8), 8, group, _small(scales), is_fp8=True)


def _gguf(weight: GgufTensor) -> CodeGrid:
    kind, out = weight.scheme.type, weight.out_features
    width, size = weight.scheme.block
    blocks = weight.data.reshape(-1, size)

    def rows(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(out, -1)

    def half(start: int) -> torch.Tensor:
        # Where they are: the kernels' packing copies them.
        return weight.data.view(torch.float16)[:, start // 2 :: size // 2]

    if kind == "MXFP4":
        values = torch.tensor(MXFP4_VALUES, dtype=torch.float32)
        steps = rows(mxfp4_steps(blocks))
        return CodeGrid(weight, 4, 32, _small(steps), table=values.to(blocks.device))
    if kind == "IQ4_XS":
        scales, values = rows(iq4_xs_scales(blocks)), iq4_table(blocks.device)
        return CodeGrid(weight, 4, 32, scales, outer_scales=half(0), nested=8, table=values)
    if kind == "IQ4_NL":
        return CodeGrid(weight, 4, 32, half(0), table=iq4_table(blocks.device))
    bits = weight.scheme.bits
    if width == 32:
        offsets = -half(2) if kind.endswith("_1") else None
        return CodeGrid(weight, bits, 32, half(0), 2 ** (bits - 1), offsets)
    if kind == "Q6_K":
        scales = rows(signed_scales(blocks))
        return CodeGrid(weight, bits, 16, scales, 32, outer_scales=half(208), nested=16)
    if kind == "Q3_K":
        scales = rows(q3_scales(blocks))
        return CodeGrid(weight, bits, 16, scales, 4, outer_scales=half(108), nested=16)
    is_small = kind == "Q2_K"
    fields = blocks[:, :16]
    scales, lows = (fields & 15, fields >> 4) if is_small else affine_scales(blocks)
    at, groups = (80, 16) if is_small else (0, 8)
    scales, lows = (rows(values).view(torch.int8) for values in (scales, lows))
    outer = half(at), half(at + 2), groups
    return CodeGrid(weight, bits, 256 // groups, scales, 2 ** (bits - 1), lows, *outer)


def with_whole_table(grid: CodeGrid) -> CodeGrid:
    """Grid with a table of whole numbers, for integer GEMMs: e2m1's values are halves."""
    if grid.table is None or bool((grid.table == grid.table.round()).all()):
        return grid
    return replace(grid, table=grid.table * 2, scales=_small(grid.scales.to(torch.float32) / 2))


def with_whole_groups(grid: CodeGrid) -> CodeGrid:
    """The grid in groups that the C kernels take, 16 or a multiple of 32 input channels. Groups of other
    multiples of 16 become several with the same scale; others, and a shorter last one, are padded with
    columns of no input channel."""
    group, inputs = grid.group, grid.shape[1]
    if group in (PER_CHANNEL, 16) or group % 32 == 0:
        return grid
    padded = -(-group // 16) * 16
    if padded != group:
        channels = torch.arange(inputs) if grid.order is None else grid.order
        order = _pad_groups(channels.unsqueeze(0), group, padded, inputs)[0]
        grid = replace(grid, stored=_pad_groups(grid.codes, group, padded, 0), order=order)
    if padded % 32 == 0:
        return replace(grid, group=padded)
    parts, offsets = padded // 16, grid.offsets
    groups = -(-grid.shape[1] // 16)  # the last may be shorter
    return replace(
        grid,
        group=16,
        scales=grid.scales.repeat_interleave(parts, 1)[:, :groups],
        offsets=None if offsets is None else offsets.repeat_interleave(parts, 1)[:, :groups],
    )


def _pad_groups(values: torch.Tensor, group: int, padded: int, value: int) -> torch.Tensor:
    """`[rows, in]` with every group of columns padded."""
    whole = functional.pad(values, (0, -values.shape[1] % group), value=value)
    parts = whole.unflatten(1, (-1, group))
    return functional.pad(parts, (0, padded - group), value=value).flatten(1)


def _small(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float16 if that is lossless, else in float32."""
    halves = scales.to(torch.float16)
    whole = scales.to(torch.float32)
    return halves if torch.equal(halves.to(torch.float32), whole) else whole


PANEL, CHUNK = 32, 32  # outputs and inputs of a tile in `weight.h`
BASE = 128
"""The kernels read 128 + weight."""
_MOST = 8.0
"""IQ1's points are eighths."""


@dataclass(frozen=True, slots=True)
class LatticeGrid:
    """A weight `[out, in]` as lattice codes: `w = unit * outer_scale * (2 * scale + 1) * signed point`.

    Attributes:
        indices: int64 `[out, in / dim]`, indices of the points.
        points: uint8 `[.., dim]`, magnitudes; without signs 128 + weight. Weights of a type share them.
        signs: uint8 `[out, in / 8]`, bit i is set where weight i is negative; None: the points have them.
        scales: uint8 `[out, groups]`, of at most four bits.
        outer_scales: float16 `[out, in / 256]`; `unit` is a power of two.
    """

    indices: torch.Tensor
    points: torch.Tensor
    signs: torch.Tensor | None
    group: int
    scales: torch.Tensor
    outer_scales: torch.Tensor
    unit: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.indices.shape[0], self.indices.shape[1] * self.points.shape[1]

    @property
    def nested(self) -> int:
        return self.scales.shape[1] // self.outer_scales.shape[1]

    @property
    def high_bits(self) -> int:
        """Bits of an index above its low byte, as many as they are stored in."""
        bits = (len(self.points) - 1).bit_length() - 8
        return next(width for width in (0, 1, 2, 4) if bits <= width)

    def packed(self) -> torch.Tensor:
        dim, bits = self.points.shape[1], self.high_bits
        parts = [_chunked((self.indices & 255).to(torch.uint8), CHUNK // dim)]
        if bits:
            high = _chunked((self.indices >> 8).to(torch.uint8), CHUNK // dim)
            parts.append(_joined(high, bits))
        if self.signs is not None:
            parts.append(_chunked(self.signs, CHUNK // 8))
        return torch.cat(parts, dim=2).flatten(2).contiguous()


def _chunked(values: torch.Tensor, per_chunk: int) -> torch.Tensor:
    """`[out, n]` as `[panels, chunks, per_chunk, PANEL]`."""
    padded = functional.pad(values, (0, 0, 0, -len(values) % PANEL))
    return padded.view(-1, PANEL, values.shape[1] // per_chunk, per_chunk).permute(0, 2, 3, 1)


def _joined(high: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of `bits` bits, `[panels, chunks, points, PANEL]`, as many in a byte as fit."""
    count = min(8 // bits, high.shape[2])
    runs = high.unflatten(2, (-1, count))
    joined = runs[:, :, :, 0].clone()
    for index in range(1, count):
        joined |= runs[:, :, :, index] << (bits * index)
    return joined


@cache
def _bytes_of_points(kind: str, device: torch.device) -> torch.Tensor:
    values = points(kind, device)
    if LATTICES[kind].signs == "in the points":
        values = values * _MOST + BASE
    return values.round().to(torch.uint8).contiguous()


def lattice_grid(weight: GgufTensor) -> LatticeGrid:
    """The grid of a weight in blocks of IQ1, IQ2 or IQ3."""
    kind, out = weight.scheme.type, weight.out_features
    lattice = LATTICES[kind]
    width, size = weight.scheme.block
    indices, signs, scales, head = lattice_fields(weight.data.reshape(-1, size), kind)
    return LatticeGrid(
        indices.reshape(out, -1),
        _bytes_of_points(kind, weight.data.device),
        None if signs is None else signs.reshape(out, -1),
        width // lattice.runs,
        scales.to(torch.uint8).reshape(out, -1),
        head.reshape(out, -1).to(torch.float16),
        lattice.unit / _MOST if lattice.signs == "in the points" else lattice.unit,
    )


NativeGrid = CodeGrid | LatticeGrid
"""A weight as the C kernels pack it."""


GRIDS: dict[str, Callable[[Any], CodeGrid | None]] = {
    "int": _integer,
    "float": _fp8,
    "codebook": _codebook,
    "fp4": _fp4,
    "vectorwise": _vectorwise,
    "gguf": _gguf,
}
"""Grids by `Scheme.kind_name`. A kind that is not here runs on its own decoder or on the reference."""
WHOLE_KINDS = ("int", "fp4", "vectorwise", "gguf")
"""Kinds whose codes, or their table's values, are whole numbers, for integer GEMMs."""


def refuses_grid(scheme: Scheme, in_features: int) -> str | None:
    """Reason why a scheme's weights of so many inputs have no grid for C and Triton, or None."""
    if scheme.kind_name not in GRIDS:
        return f"{scheme.label} has no scales of groups"
    if isinstance(scheme, CodebookScheme) and in_features % scheme.block_size:
        return f"blocks of {scheme.block_size} weights cross the rows of {in_features}"
    if isinstance(scheme, GgufScheme) and scheme.type not in WHOLE_BLOCKS + TABLE_BLOCKS:
        return f"it has no kernel for blocks of {scheme.type}"
    return None


def _is_lattice(scheme: Scheme) -> bool:
    return isinstance(scheme, GgufScheme) and scheme.type in LATTICES


def refuses_native_grid(scheme: Scheme, in_features: int) -> str | None:
    return None if _is_lattice(scheme) else refuses_grid(scheme, in_features)


def has_whole_codes(scheme: Scheme) -> bool:
    return scheme.kind_name in WHOLE_KINDS and refuses_native_grid(scheme, 0) is None


def grid_of(weight: QuantizedTensor) -> CodeGrid | None:
    """Grid of a weight whose scheme `refuses_grid` supports; None for unequal groups of a permuted weight."""
    return GRIDS[weight.scheme.kind_name](weight)


def native_grid_of(weight: QuantizedTensor) -> NativeGrid | None:
    if isinstance(weight, GgufTensor) and _is_lattice(weight.scheme):
        return lattice_grid(weight)
    return grid_of(weight)
