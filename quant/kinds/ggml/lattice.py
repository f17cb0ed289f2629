"""ggml's IQ1, IQ2 and IQ3 types: points of a lattice in 4 or 8 dimensions with signs; search and byte layout.

The points are read from the package `gguf`. For a step all points of the codebook are compared, in one GEMM:
`sum w (x - s p)²` is, up to a constant, the product of `(-2 s w x, s² w)` with `(p, p²)`. (ggml compares a
point's listed neighbours.) Steps of the runs come from rounding single weights first and points then; they
are quantized under the block's scale, and neighbouring scales are tried on the stored grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ....base.extras import import_extra
from ..base.grid import where
from .fit import error_weights, fit_signed, half, reciprocal
from .small_blocks import pack_bits, read_half, shifts, unpack_bits

_DELTA = 0.125  # IQ1: what is added to all values of a run or a point, or subtracted


@dataclass(frozen=True, slots=True)
class Lattice:
    """How a type's blocks of 256 weights are made of lattice points.

    Attributes:
        scale_bits: width of a run's scale; its step is `d * unit * (2 * scale + 1)`.
        signs: `free`, `even` (an even number of minuses among eight), or `in the points`.
    """

    dim: int
    runs: int
    scale_bits: int
    unit: float
    signs: str


LATTICES = {
    "IQ1_S": Lattice(8, 8, 3, 1.0, "in the points"),
    "IQ1_M": Lattice(8, 16, 3, 1.0, "in the points"),
    "IQ2_XXS": Lattice(8, 8, 4, 0.125, "even"),
    "IQ2_XS": Lattice(8, 16, 4, 0.125, "even"),
    "IQ2_S": Lattice(8, 16, 4, 0.125, "free"),
    "IQ3_XXS": Lattice(4, 8, 4, 0.25, "even"),
    "IQ3_S": Lattice(4, 8, 4, 1.0, "free"),
}


@cache
def points(type_name: str, device: torch.device) -> torch.Tensor:
    """The points of a type, float32 `[count, dim]`, IQ1's with ± delta. BadInput: no package `gguf`."""
    quants = import_extra(f"the codebook of {type_name}", "gguf", "gguf.quants")
    reader = getattr(quants, type_name)
    reader.init_grid()
    table = torch.from_numpy(np.array(reader.grid).reshape(reader.grid_shape)).to(device)
    return torch.cat([table + _DELTA, table - _DELTA]) if type_name.startswith("IQ1") else table


@cache
def sign_bytes(device: torch.device) -> torch.Tensor:
    """The signs of eight weights by their first seven, uint8 `[128]`: the number of minuses is even."""
    seven = torch.arange(128, device=device)
    parity = sum((seven >> bit) & 1 for bit in range(7)) & 1
    return (seven | (parity << 7)).to(torch.uint8)


# Entries of a table of costs, and steps around that of single weights.
_COSTS_AT_ONCE = 2**22
_FACTORS = (0.85, 0.92, 1.0, 1.08)
_TOPS = tuple(step / 4 for step in range(-8, 5))


class LatticeCodes(NamedTuple):
    """Codes of blocks.

    Attributes:
        indices: numbers of the points, int64 `[n, 256 / dim]`.
        minus: True for negative weights, bool `[n, 256]`; empty where points have signs.
        scales: int64 `[n, runs]`.
        head: d, float16 `[n, 1]`.
    """

    indices: torch.Tensor
    minus: torch.Tensor
    scales: torch.Tensor
    head: torch.Tensor


def _search(blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None) -> LatticeCodes:
    lattice, table = LATTICES[type_name], points(type_name, blocks.device)
    at_once = max(1, _COSTS_AT_ONCE * lattice.dim // (256 * len(table)))
    if len(blocks) > at_once:
        weights = [None] * len(blocks) if importance is None else importance.split(at_once)
        parts = (
            _search(b, type_name, w) for b, w in zip(blocks.split(at_once), weights, strict=False)
        )
        return LatticeCodes(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    x = blocks.view(-1, lattice.runs, 256 // lattice.runs)
    weights = error_weights(x, importance)
    minus, target = _signs(x, weights, lattice)
    fit = _Fit(target, weights, table, 2 if type_name == "IQ1_S" else 1)
    steps, curvature = fit.steps()
    head, scales = _fit_head(steps, curvature, lattice)
    indices, errors = fit.nearest(head * (2 * scales + 1))
    first, most = scales, 2**lattice.scale_bits - 1
    best = errors, scales, indices
    for shift in (-1, 1):
        tried = (first + shift).clamp_(0, most)
        other, other_errors = fit.nearest(head * (2 * tried + 1))
        best = where(other_errors < best[0], (other_errors, tried, other), best)
    errors, scales, indices = best
    odd = 2 * scales + 1
    products, squares = fit.sums(indices)
    over = (squares * odd * odd).sum(dim=-1, keepdim=True)
    refitted = (products * odd).sum(dim=-1, keepdim=True) / over
    refitted = _stored(torch.where((over > 0) & (refitted > 0), refitted, head), lattice)
    other, other_errors = fit.nearest(refitted * odd)
    better = other_errors.sum(dim=-1, keepdim=True) < errors.sum(dim=-1, keepdim=True)
    head, indices = where(better, (refitted, other), (head, indices))
    return LatticeCodes(
        indices.flatten(1), minus, scales.long(), (head / lattice.unit).to(torch.float16)
    )


def _signs(
    x: torch.Tensor, weights: torch.Tensor, lattice: Lattice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs bool `[n, 256]`, and what points meet; the cheapest weight turns for an even number."""
    if lattice.signs == "in the points":
        return x.new_zeros(len(x), 0, dtype=torch.bool), x
    minus = (x < 0).view(len(x), -1, 8)
    if lattice.signs == "even":
        odd = minus.sum(dim=-1, keepdim=True) % 2 == 1
        cheapest = (weights * x.square()).view_as(minus).argmin(dim=-1, keepdim=True)
        flipped = minus.scatter(-1, cheapest, ~minus.gather(-1, cheapest))
        minus = torch.where(odd, flipped, minus)
    minus = minus.flatten(1)
    return minus, torch.where(minus.view_as(x), -x, x)


class _Fit:
    """Nearest points to runs of weights, for given steps."""

    def __init__(
        self, target: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, halves: int
    ):
        """With 2 `halves` all points of a run come from the same half of the table."""
        self._x, self._weights, self._table, self._halves = target, weights, table, halves
        dim = table.shape[1]
        self._points = target.unflatten(-1, (-1, dim))
        self._point_weights = weights.unflatten(-1, (-1, dim))
        self._both = torch.cat([table, table.square()], dim=-1).T.contiguous()

    def steps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The best step of each run found, and `sum w p²` there, `[n, runs]`."""
        levels = self._table.unique()
        middles = (levels[1:] + levels[:-1]) / 2

        def nearest(scaled: torch.Tensor) -> torch.Tensor:
            return levels[torch.bucketize(scaled, middles)]

        top = float(levels[-1])
        extremes = tuple(top * (0.5 + step / 20) for step in range(14))
        start = fit_signed(self._x.abs(), self._weights, nearest, extremes)
        best = torch.zeros_like(start), start, torch.zeros_like(start)
        for factor in _FACTORS:
            indices, _ = self.nearest(start * factor)
            products, squares = self.sums(indices)
            gain = torch.where(products > 0, products * products / squares, 0.0)
            best = where(gain > best[0], (gain, products / squares, squares), best)
        return best[1], best[2]

    def nearest(self, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Points of least error at steps `[n, runs]`, int64 `[n, runs, points]`, and the runs' errors."""
        scale = steps[..., None, None]
        weighted = self._point_weights * scale
        sides = torch.cat([-2 * weighted * self._points, weighted * scale], dim=-1)
        costs = sides.flatten(0, -2) @ self._both
        costs = costs.view(*sides.shape[:-1], self._halves, -1)
        least, indices = costs.min(dim=-1)  # [n, runs, points, halves]
        errors = least.sum(dim=2)
        half_of = errors.argmin(dim=-1, keepdim=True)
        chosen = half_of.unsqueeze(2).expand(*indices.shape[:-1], 1)
        offset = half_of * (len(self._table) // self._halves)
        return indices.gather(-1, chosen).squeeze(-1) + offset, errors.amin(dim=-1)

    def sums(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._table[indices].flatten(-2)
        weighted = self._weights * values
        return (weighted * self._x).sum(dim=-1), (weighted * values).sum(dim=-1)


def _fit_head(
    steps: torch.Tensor, curvature: torch.Tensor, lattice: Lattice
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step for a block, `[n, 1]`, and codes of the runs: `steps ≈ head * (2 * code + 1)`."""
    largest, most = steps.amax(dim=-1, keepdim=True), 2**lattice.scale_bits - 1
    best = torch.full_like(largest, torch.inf), torch.zeros_like(largest), torch.zeros_like(steps)
    codes, odd = best[2], best[2]
    for shift in _TOPS:
        head = largest / (2 * most + 1 + shift)
        for _ in range(2):
            codes = ((steps * reciprocal(head) - 1) / 2).round().clamp(0, most)
            odd = 2 * codes + 1
            over = (curvature * odd * odd).sum(dim=-1, keepdim=True)
            fitted = (curvature * steps * odd).sum(dim=-1, keepdim=True) / over
            head = _stored(torch.where(over > 0, fitted, head), lattice)
        error = (curvature * (head * odd - steps).square()).sum(dim=-1, keepdim=True)
        best = where(error < best[0], (error, head, codes), best)
    return best[1], best[2]


def _stored(head: torch.Tensor, lattice: Lattice) -> torch.Tensor:
    return half(head / lattice.unit) * lattice.unit


Fields = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def quantize_lattice(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """Blocks of weights, float32 `[n, 256]`, as bytes."""
    codes = _search(blocks, type_name, importance)
    head = codes.head.view(torch.uint8)
    signs = pack_bits(codes.minus.to(torch.uint8))
    low = (codes.indices & 255).to(torch.uint8)
    if type_name in ("IQ1_S", "IQ1_M"):
        return _pack_one_bit(codes, type_name, head, low)
    if type_name in (
        "IQ2_XXS",
        "IQ3_XXS",
    ):  # a word for each run: four times seven signs, and the scale
        seven = (signs & 127).long().view(-1, 8, 4) << _steps(7, signs.device)
        words = _bytes(seven.sum(dim=-1) | (codes.scales << 28), 4)
        if type_name == "IQ3_XXS":
            return torch.cat([head, low, words], dim=-1)
        pairs = torch.cat([low.view(-1, 8, 4), words.view(-1, 8, 4)], dim=-1)
        return torch.cat([head, pairs.flatten(1)], dim=-1)
    nibbles = (codes.scales[:, 0::2] | (codes.scales[:, 1::2] << 4)).to(torch.uint8)
    if type_name == "IQ2_XS":
        words = codes.indices | ((signs & 127).long() << 9)
        return torch.cat([head, _bytes(words, 2), nibbles], dim=-1)
    high = codes.indices >> 8
    bits = 1 if type_name == "IQ3_S" else 2
    fields = high.unflatten(-1, (-1, 8 // bits)) << shifts(bits, high.device)
    packed = fields.sum(dim=-1).to(torch.uint8)
    middle = [packed, signs] if type_name == "IQ3_S" else [signs, packed]
    return torch.cat([head, low, *middle, nibbles], dim=-1)


def dequantize_lattice(data: torch.Tensor, type_name: str) -> torch.Tensor:
    indices, signs, scales, head = lattice_fields(data, type_name)
    lattice = LATTICES[type_name]
    values = points(type_name, data.device)[indices].view(len(data), lattice.runs, -1)
    if signs is not None:
        minus = unpack_bits(signs).view_as(values)
        values = torch.where(minus == 1, -values, values)
    steps = head * (2 * scales.to(torch.float32) + 1) * lattice.unit
    return (steps.unsqueeze(-1) * values).view(-1, 256)


def lattice_fields(data: torch.Tensor, type_name: str) -> Fields:
    """Unpack blocks: indices of points, bytes of signs, scales `[n, runs]`, and d float32 `[n, 1]`."""
    if type_name == "IQ1_S":
        high = _words(data[:, 34:50], 2)
        third = (high.unsqueeze(-1) >> _steps(3, data.device)) & 7
        below = (high >> 15).repeat_interleave(4, dim=-1)
        indices = data[:, 2:34].long() | (third.flatten(1) << 8) | (below << 11)
        return indices, None, (high >> 12) & 7, read_half(data, 0)
    if type_name == "IQ1_M":
        nibbles = torch.stack([data[:, 32:48] & 15, data[:, 32:48] >> 4], dim=-1).flatten(1)
        words = _words(data[:, 48:56], 2)
        scales = (words.unsqueeze(-1) >> _steps(3, data.device)) & 7
        parts = (words >> 12) << _steps(4, data.device)
        head = _bytes(parts.sum(dim=-1, keepdim=True), 2)
        indices = data[:, :32].long() | (nibbles.long() << 8)
        return indices, None, scales.flatten(1), read_half(head, 0)
    head, device = read_half(data, 0), data.device
    if type_name in ("IQ2_XXS", "IQ3_XXS"):
        if type_name == "IQ2_XXS":
            pairs = data[:, 2:].reshape(len(data), 8, 8)
            indices, tail = pairs[:, :, :4].flatten(1), pairs[:, :, 4:].flatten(1)
        else:
            indices, tail = data[:, 2:66], data[:, 66:]
        words = _words(tail, 4)
        seven = (words.unsqueeze(-1) >> _steps(7, device)) & 127
        return indices.long(), sign_bytes(device)[seven.flatten(1)], words >> 28, head
    at = {"IQ2_XS": 66, "IQ2_S": 74, "IQ3_S": 106}[type_name]
    scales = torch.stack([data[:, at:] & 15, data[:, at:] >> 4], dim=-1).flatten(1)
    if type_name == "IQ2_XS":
        words = _words(data[:, 2:66], 2)
        return words & 511, sign_bytes(device)[words >> 9], scales, head
    if type_name == "IQ2_S":
        low, signs, packed, bits = data[:, 2:34], data[:, 34:66], data[:, 66:74], 2
    else:
        low, packed, signs, bits = data[:, 2:66], data[:, 66:74], data[:, 74:106], 1
    high = ((packed.unsqueeze(-1) >> shifts(bits, device)) & (2**bits - 1)).flatten(1)
    return low.long() | (high.long() << 8), signs, scales, head


def _steps(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 4 * bits, bits, device=device)


def _pack_one_bit(
    codes: LatticeCodes, type_name: str, head: torch.Tensor, low: torch.Tensor
) -> torch.Tensor:
    """IQ1: indices of 11 bits, whose twelfth says that the delta is subtracted."""
    if type_name == "IQ1_S":
        high = ((codes.indices >> 8) & 7).view(-1, 8, 4)
        below = (codes.indices >> 11).view(-1, 8, 4)[:, :, 0]
        high = (high << _steps(3, low.device)).sum(dim=-1)
        words = high | (codes.scales << 12) | (below << 15)
        return torch.cat([head, low, _bytes(words, 2)], dim=-1)
    nibbles = (codes.indices >> 8).to(torch.uint8)
    pairs = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    bits = _words(head, 2)
    parts = (bits >> _steps(4, low.device)) & 15
    scales = codes.scales.view(-1, 4, 4) << _steps(3, low.device)
    words = scales.sum(dim=-1) | (parts << 12)
    return torch.cat([low, pairs, _bytes(words, 2)], dim=-1)


def _bytes(words: torch.Tensor, size: int) -> torch.Tensor:
    places = torch.arange(0, 8 * size, 8, device=words.device)
    return ((words.unsqueeze(-1) >> places) & 255).to(torch.uint8).flatten(1)


def _words(data: torch.Tensor, size: int) -> torch.Tensor:
    places = torch.arange(0, 8 * size, 8, device=data.device)
    return (data.unflatten(-1, (-1, size)).long() << places).sum(dim=-1)
