"""Scales of packed weights in as few bits as their file has, without loss: the scale kinds of `weight.h`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ....quant.native.build import native
from .grid import Grid

SCALE_KINDS = [torch.float32, torch.float16, torch.int8]
SCALE_TABLE, _SCALE_NIBBLE, SCALE_ODD = 3, 4, 5
_OFFSET_KINDS = [None, torch.uint8, torch.float16, torch.int8]
_OFFSET_NIBBLE = 4
_MOST_INDEXED = 256  # values that a byte tells apart
_FIRST = 1024  # scales that tell whether there may be so few
_LEAST = 4096  # scales that are worth a table


@dataclass(frozen=True, slots=True)
class PackedScales:
    """Scales and offsets `[out, groups]`, and how `weight.h` reads them.

    Attributes:
        kind, offset_kind: `SCALE_...` and `OFFSET_...`.
        table: float32 `[256]`, which `scales` index if the kind is `SCALE_TABLE`.
    """

    scales: torch.Tensor
    offsets: torch.Tensor | None
    kind: int
    offset_kind: int
    table: torch.Tensor | None = None


def packed_scales(grid: Grid) -> PackedScales:
    """The scales of a grid: floats of at most 256 values as bytes into a table (e4m3, exponents of two),
    and 4-bit pairs of scale and offset in one byte (Q2_K)."""
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
    library = native(Path(__file__).with_name("pack.c")).library
    if scales.dtype is torch.float16 and library is not None:
        indices = torch.empty(scales.shape, dtype=torch.uint8)
        values = torch.zeros(_MOST_INDEXED, dtype=torch.float16)
        pointers = indices.data_ptr(), values.data_ptr()
        call = _IndexCall(scales.data_ptr(), *scales.shape, *scales.stride(), *pointers)
        if library.llmopt_index_scales(ctypes.byref(call)) > _MOST_INDEXED:
            return None, None
        return values.to(torch.float32), indices
    if len(scales.flatten()[:_FIRST].unique()) > _MOST_INDEXED:
        return None, None
    values, indices = scales.unique(return_inverse=True)
    if len(values) > _MOST_INDEXED:
        return None, None
    table = functional.pad(values.to(torch.float32), (0, _MOST_INDEXED - len(values)))
    return table, indices.to(torch.uint8)


class _IndexCall(ctypes.Structure):
    """`IndexCall` of `pack.c`."""

    _fields_ = [
        ("scales", ctypes.c_void_p),
        *[(n, ctypes.c_int64) for n in ("rows", "columns", "row_stride", "column_stride")],
        *[(name, ctypes.c_void_p) for name in ("indices", "values")],
    ]
