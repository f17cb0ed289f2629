"""Search of lattice codebooks: steps and points of least weighted squared error.

For a step all points of the codebook are compared, in one GEMM: `sum w (x - s p)²` is, up to a constant, the
product of `(-2 s w x, s² w)` with `(p, p²)`. (ggml compares a point's listed neighbours.) Steps of the runs
come from rounding single weights first and points then; they are quantized under the block's scale, and
neighbouring scales are tried on the stored grid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .fit import error_weights, fit_signed, half, reciprocal
from .lattice_tables import LATTICES, Lattice, points

# Entries of a table of costs, and steps around that of single weights.
_COSTS_AT_ONCE = 2**22
_FACTORS = (0.85, 0.92, 1.0, 1.08)
_TOPS = tuple(step / 4 for step in range(-8, 5))


class LatticeCodes(NamedTuple):
    """Codes of blocks.

    Attributes:
        indices: of the points, int64 `[n, 256 / dim]`.
        minus: whether a weight is negative, bool `[n, 256]`; empty where points have signs.
        scales: int64 `[n, runs]`.
        head: float16 `[n, 1]`: d.
    """

    indices: torch.Tensor
    minus: torch.Tensor
    scales: torch.Tensor
    head: torch.Tensor


def search_lattice(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> LatticeCodes:
    """Codes of blocks, float32 `[n, 256]`; `importance` as for `quantize_blocks`."""
    lattice, table = LATTICES[type_name], points(type_name, blocks.device)
    at_once = max(1, _COSTS_AT_ONCE * lattice.dim // (256 * len(table)))
    parts = []
    for begin in range(0, len(blocks), at_once):
        rows = slice(begin, begin + at_once)
        some = None if importance is None else importance[rows]
        parts.append(_search(blocks[rows], some, type_name, lattice, table))
    return LatticeCodes(*(torch.cat(found) for found in zip(*parts, strict=True)))


def _search(
    blocks: torch.Tensor,
    importance: torch.Tensor | None,
    type_name: str,
    lattice: Lattice,
    table: torch.Tensor,
) -> LatticeCodes:
    x = blocks.view(-1, lattice.runs, 256 // lattice.runs)
    weights = error_weights(x, importance)
    minus, target = _signs(x, weights, lattice)
    fit = _Fit(target, weights, table, lattice.dim, shared_sign=type_name == "IQ1_S")
    steps, curvature = fit.steps()
    head, scales = _fit_head(steps, curvature, lattice)
    indices, errors = fit.nearest(head * (2 * scales + 1))
    first, most = scales, 2**lattice.scale_bits - 1
    for shift in (-1, 1):
        tried = (first + shift).clamp_(0, most)
        other, other_errors = fit.nearest(head * (2 * tried + 1))
        better = other_errors < errors
        errors = torch.where(better, other_errors, errors)
        scales = torch.where(better, tried, scales)
        indices = torch.where(better.unsqueeze(-1), other, indices)
    odd = 2 * scales + 1
    products, squares = fit.sums(indices)
    over = (squares * odd * odd).sum(dim=-1, keepdim=True)
    refitted = (products * odd).sum(dim=-1, keepdim=True) / over
    refitted = _stored(torch.where((over > 0) & (refitted > 0), refitted, head), lattice)
    other, other_errors = fit.nearest(refitted * odd)
    better = other_errors.sum(dim=-1, keepdim=True) < errors.sum(dim=-1, keepdim=True)
    head = torch.where(better, refitted, head)
    indices = torch.where(better.unsqueeze(-1), other, indices)
    return LatticeCodes(
        indices.flatten(1), minus, scales.long(), (head / lattice.unit).to(torch.float16)
    )


def _signs(
    x: torch.Tensor, weights: torch.Tensor, lattice: Lattice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs bool `[n, 256]`, and what the points are to meet.

    Where the number of minuses must be even and is not, the weight that costs least takes the wrong sign.
    """
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
        self,
        target: torch.Tensor,
        weights: torch.Tensor,
        table: torch.Tensor,
        dim: int,
        *,
        shared_sign: bool,
    ) -> None:
        """With `shared_sign` all points of a run come from the same half of the table."""
        self._x, self._weights, self._table = target, weights, table
        self._points = target.unflatten(-1, (-1, dim))
        self._point_weights = weights.unflatten(-1, (-1, dim))
        self._halves = 2 if shared_sign else 1
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
        best, gains = start, torch.zeros_like(start)
        curvature = torch.zeros_like(start)
        for factor in _FACTORS:
            indices, _ = self.nearest(start * factor)
            products, squares = self.sums(indices)
            gain = torch.where(products > 0, products * products / squares, 0.0)
            better = gain > gains
            gains = torch.where(better, gain, gains)
            best = torch.where(better, products / squares, best)
            curvature = torch.where(better, squares, curvature)
        return best, curvature

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
        """`sum w x p` and `sum w p²` of each run, `[n, runs]`."""
        values = self._table[indices].flatten(-2)
        weighted = self._weights * values
        return (weighted * self._x).sum(dim=-1), (weighted * values).sum(dim=-1)


def _fit_head(
    steps: torch.Tensor, curvature: torch.Tensor, lattice: Lattice
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step for a block, `[n, 1]`, and codes of the runs: `steps ≈ head * (2 * code + 1)`."""
    largest, most = steps.amax(dim=-1, keepdim=True), 2**lattice.scale_bits - 1
    best_head, best_codes = torch.zeros_like(largest), torch.zeros_like(steps)
    best_error = torch.full_like(largest, torch.inf)
    codes, odd = best_codes, best_codes
    for shift in _TOPS:
        head = largest / (2 * most + 1 + shift)
        for _ in range(2):
            codes = ((steps * reciprocal(head) - 1) / 2).round().clamp(0, most)
            odd = 2 * codes + 1
            over = (curvature * odd * odd).sum(dim=-1, keepdim=True)
            fitted = (curvature * steps * odd).sum(dim=-1, keepdim=True) / over
            head = _stored(torch.where(over > 0, fitted, head), lattice)
        error = (curvature * (head * odd - steps).square()).sum(dim=-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_head = torch.where(better, head, best_head)
        best_codes = torch.where(better, codes, best_codes)
    return best_head, best_codes


def _stored(head: torch.Tensor, lattice: Lattice) -> torch.Tensor:
    """What the float16 of a block holds of a step."""
    return half(head / lattice.unit) * lattice.unit
