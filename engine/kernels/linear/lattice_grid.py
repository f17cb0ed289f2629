"""Grids of lattice codes: points of 4 or 8 weights and their signs, for the C kernels (IQ1 to IQ3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from ....quant.kinds.ggml.lattice import LATTICES, lattice_fields, points
from ....quant.kinds.ggml.tensor import GgufTensor

PANEL, CHUNK = 32, 32
BASE = 128
"""The kernels read 128 + weight."""
_MOST = 8.0
"""IQ1's points are eighths."""


@dataclass(frozen=True, slots=True)
class LatticeGrid:
    """A weight `[out, in]` as lattice codes: `w = unit * outer_scale * (2 * scale + 1) * signed point`.

    Attributes:
        indices: int64 `[out, in / dim]`, of the points.
        points: uint8 `[.., dim]`, magnitudes; without signs 128 + weight. Weights of a type share them.
        signs: uint8 `[out, in / 8]`, bit i is set where weight i is negative; None: the points have them.
        group: input channels that share a scale.
        scales: uint8 `[out, groups]`, of at most four bits.
        outer_scales: float16 `[out, in / 256]`.
        unit: a power of two.
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
        """`(out_features, in_features)`."""
        return self.indices.shape[0], self.indices.shape[1] * self.points.shape[1]

    @property
    def nested(self) -> int:
        """Groups that share an outer scale."""
        return self.scales.shape[1] // self.outer_scales.shape[1]

    @property
    def high_bits(self) -> int:
        """Bits of an index above its low byte, as many as they are stored in."""
        bits = (len(self.points) - 1).bit_length() - 8
        return next(width for width in (0, 1, 2, 4) if bits <= width)

    def packed(self) -> torch.Tensor:
        """Codes in the layout of `lattice.h`, uint8 `[panels, chunks, bytes]`."""
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
    each = min(8 // bits, high.shape[2])
    runs = high.unflatten(2, (-1, each))
    joined = runs[:, :, :, 0].clone()
    for index in range(1, each):
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
