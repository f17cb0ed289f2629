"""Weight packing for the C kernels: from a grid to the layout that `weight.h` describes.

Scales lie in as few bits as their file has, without loss.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.nn import functional

from ....base.build import beside, fields
from ....quant.base.scheme import PER_CHANNEL
from ....quant.kinds.ggml.tensor import Blocks, GgufTensor, blocks_of
from ..common.graphs import struct
from .grid import BASE, CHUNK, PANEL, CodeGrid, LatticeGrid, NativeGrid

native_pack = beside(__file__, "pack.c")
SCALE_KINDS = [torch.float32, torch.float16, torch.int8]
SCALE_TABLE, _SCALE_NIBBLE, SCALE_ODD = 3, 4, 5
_OFFSET_KINDS = [None, torch.uint8, torch.float16, torch.int8]
_OFFSET_NIBBLE = 4
_MOST_INDEXED = 256  # values that a byte tells apart
_FIRST = 1024  # scales that tell whether there may be so few
_LEAST = 4096  # scales that are worth a table

# Of `pack.c`.
_IndexCall = struct(
    *("IndexCall", "scales", "rows columns row_stride column_stride"),
    *fields("indices values"),
)


@dataclass(frozen=True, slots=True)
class PackedScales:
    """Scales and offsets `[out, groups]`, and their `SCALE_...` and `OFFSET_...` kinds (`weight.h`).
    `SCALE_TABLE` indexes `table`, float32 `[256]`."""

    scales: torch.Tensor
    offsets: torch.Tensor | None
    kind: int
    offset_kind: int
    table: torch.Tensor | None = None


def packed_scales(grid: CodeGrid) -> PackedScales:
    """Scales of a grid: of at most 256 values by a table; Q2_K's 4-bit pairs with offsets in a byte."""
    scales, offsets = grid.scales, grid.offsets
    kind = None if offsets is None else offsets.dtype
    offset_kind = _OFFSET_KINDS.index(kind)
    if offsets is not None and scales.dtype is kind is torch.int8:
        low, high = scales.view(torch.uint8), offsets.view(torch.uint8)
        if int((low | high).max()) < 16:
            return PackedScales(low | high << 4, None, _SCALE_NIBBLE, _OFFSET_NIBBLE)
    if scales.is_floating_point() and scales.numel() >= _LEAST:
        values, indices = _indexed(scales)
        if indices is not None:
            return PackedScales(indices, offsets, SCALE_TABLE, offset_kind, values)
    return PackedScales(scales, offsets, SCALE_KINDS.index(scales.dtype), offset_kind)


def _indexed(scales: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The values of scales, float32 `[256]`, and each scale's index, uint8; Nones: there are more."""
    if scales.dtype is torch.float16:
        indices = torch.empty(scales.shape, dtype=torch.uint8)
        values = torch.zeros(_MOST_INDEXED, dtype=torch.float16)
        pointers = indices.data_ptr(), values.data_ptr()
        call = _IndexCall(scales.data_ptr(), *scales.shape, *scales.stride(), *pointers)
        count_values = native_pack().function("llmopt_index_scales")
        if count_values(ctypes.byref(call)) > _MOST_INDEXED:
            return None, None
        return values.to(torch.float32), indices
    if len(scales.flatten()[:_FIRST].unique()) > _MOST_INDEXED:
        return None, None
    values, indices = scales.unique(return_inverse=True)
    if len(values) > _MOST_INDEXED:
        return None, None
    table = functional.pad(values.to(torch.float32), (0, _MOST_INDEXED - len(values)))
    return table, indices.to(torch.uint8)


WeightStruct = struct(  # `Weight` of `weight.h`
    *("Weight", ""),
    "out_features in_features bits kind base group step scale_kind offset_kind nested",
    *fields("codes scales offsets outer_scales outer_offsets table points"),
    *fields(numbers="dim high_bits has_signs"),
    ("unit", ctypes.c_float),
)


class PackedWeight:
    """A grid, or a tensor of 16-bit floats, in the C kernels' layout: tensors and the struct of them. At most
    `max_step` input channels are accumulated before a scale is applied."""

    def __init__(self, grid: NativeGrid | torch.Tensor, max_step: int) -> None:
        whole_row = -(-grid.shape[1] // CHUNK) * CHUNK
        if isinstance(grid, torch.Tensor):
            tensors = {"codes": pack_codes(grid, 16)}
            kind = 4 if grid.dtype is torch.bfloat16 else 5
            read = {"bits": 16, "kind": kind, "group": whole_row, "step": max_step}
        elif isinstance(grid, LatticeGrid):
            tensors = {
                "codes": grid.packed(),
                "scales": _panels(grid.scales[:, 0::2] | grid.scales[:, 1::2] << 4),
                "outer_scales": _panels(grid.outer_scales),
                "points": grid.points,
            }
            read = {
                "bits": 8,
                "kind": 3,
                "base": BASE,
                "group": grid.group,
                "step": step_of(grid.group, max_step),
                "scale_kind": SCALE_ODD,
                "nested": grid.nested,
                "dim": grid.points.shape[1],
                "high_bits": grid.high_bits,
                "has_signs": grid.signs is not None,
                "unit": grid.unit,
            }
        else:
            whole, scales = grid.group == PER_CHANNEL, packed_scales(grid)
            has_table = scales.kind == SCALE_TABLE
            tensors = {
                "codes": pack_codes(grid.stored, grid.bits),
                "scales": _panels(scales.scales),
                "offsets": _panels(scales.offsets),
                "outer_scales": scales.table if has_table else _panels(grid.outer_scales),
                "outer_offsets": _panels(grid.outer_offsets),
                "table": grid.table,
            }
            read = {
                "bits": grid.bits,
                "kind": 2 if grid.is_fp8 else 1 if grid.table is not None else 0,
                "base": BASE if grid.table is not None else grid.base,
                "group": whole_row if whole else grid.group,
                "step": max_step if whole else step_of(grid.group, max_step),
                "scale_kind": scales.kind,
                "offset_kind": scales.offset_kind,
                "nested": grid.nested,
                "unit": 1.0,
            }
        self._tensors = {name: t for name, t in tensors.items() if t is not None}
        shared = "points"  # by all weights of a type
        self.nbytes = sum(t.nbytes for name, t in self._tensors.items() if name != shared)
        pointers = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        self.struct = WeightStruct(
            out_features=grid.shape[0], in_features=grid.shape[1], **read, **pointers
        )

    def columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Dequantized weights of some input channels, float32 `[out, columns]`: 8-bit, per channel."""
        bytes_ = self._tensors["codes"].unflatten(-1, (PANEL, 4))
        chosen = bytes_[:, columns // CHUNK, columns % CHUNK // 4, :, columns % 4]
        codes = chosen.permute(1, 2, 0).flatten(0, 1).to(torch.float32) - self.struct.base
        scales = self._tensors["scales"].flatten()
        if self.struct.scale_kind == SCALE_TABLE:
            scales = self._tensors["outer_scales"].index_select(0, scales.int())
        return (codes * scales.unsqueeze(1))[: self.struct.out_features]


def step_of(group: int, max_step: int) -> int:
    """Input channels accumulated before a scale is applied: a group, or an even part of it."""
    parts = -(-group // max_step)
    while group % parts or (group // parts) % CHUNK:
        if parts * CHUNK > group:
            return group
        parts += 1
    return group // parts


_PackCall = struct(  # of `pack.c`
    *("PackCall", "codes packed", "", ("blocks", Blocks)),
    *fields(numbers="out_features in_features bits threads"),
    ("next", ctypes.c_long),
)


def pack_codes(codes: torch.Tensor | GgufTensor, bits: int) -> torch.Tensor:
    """Pack codes `[out, in]`, blocks or 16-bit floats to `[panels, chunks, bits, 4 * PANEL]`, uint8."""
    is_blocks = isinstance(codes, GgufTensor)
    out_features, in_features = codes.shape
    panels, chunks = -(-out_features // PANEL), -(-in_features // CHUNK)
    packed = torch.empty(panels, chunks, bits, 4 * PANEL, dtype=torch.uint8)
    data = (codes.data if is_blocks else codes).contiguous()
    blocks = blocks_of(codes.scheme.type) if is_blocks else Blocks()
    sizes = out_features, in_features, bits, torch.get_num_threads()
    call = _PackCall(data.data_ptr(), packed.data_ptr(), blocks, *sizes)
    native_pack().function("llmopt_pack")(ctypes.byref(call))
    return packed


def _panels(values: torch.Tensor | None) -> torch.Tensor | None:
    """`[out, groups]` as `[panels, groups, PANEL]`."""
    if values is None:
        return None
    if values.shape[0] % PANEL:
        values = functional.pad(values, (0, 0, 0, -values.shape[0] % PANEL))
    return values.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
