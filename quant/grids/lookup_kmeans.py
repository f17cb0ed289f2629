"""Weighted 1-D k-means per output channel, batched over channels.

In one dimension a cluster is an interval of the sorted values, so its sums are differences of prefix sums,
and an iteration costs a binary search per boundary instead of a pass over the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ITERATIONS = 50


class SortedRows(NamedTuple):
    """Sorted values, and their prefix sums with a leading zero, float64.

    Attributes:
        values: float32 `[rows, n]`.
        mass: of the importance, `[rows, n + 1]`.
        moment: of importance times value, `[rows, n + 1]`.
    """

    values: torch.Tensor
    mass: torch.Tensor
    moment: torch.Tensor


def sort_rows(values: torch.Tensor, importance: torch.Tensor) -> SortedRows:
    """Sort rows and compute prefix sums for `fit_tables`.

    Args:
        values: float32 `[rows, n]`.
        importance: float32 `[rows, n]`, not negative; a value of importance 0 does not attract a centre.
    """
    ordered, index = values.sort(dim=1)
    masses = importance.gather(1, index).to(torch.float64)
    start = torch.zeros(values.shape[0], 1, dtype=torch.float64)
    return SortedRows(
        ordered,
        torch.cat([start, masses.cumsum(dim=1)], dim=1),
        torch.cat([start, (masses * ordered).cumsum(dim=1)], dim=1),
    )


def fit_tables(rows: SortedRows, start: torch.Tensor) -> torch.Tensor:
    """Tables of (locally) least weighted squared error, by Lloyd's iterations.

    Two initialisations are tried, `start` and quantiles of the importance; each row keeps the better result.

    Args:
        start: float32 `[rows, k]`, ascending.

    Returns:
        Float32 `[rows, k]`, ascending.
    """
    first = _iterate(rows, start.to(torch.float64))
    second = _iterate(rows, _equal_shares(rows, start.shape[1]))
    take_second = _gain(rows, second) > _gain(rows, first)
    return torch.where(take_second.unsqueeze(1), second, first).to(torch.float32)


def _equal_shares(rows: SortedRows, count: int) -> torch.Tensor:
    """Quantile initialisation: values at the middles of `count` equal shares of each row's importance."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    wanted = rows.mass[:, -1:] * shares
    index = torch.searchsorted(rows.mass[:, 1:].contiguous(), wanted.contiguous())
    return rows.values.gather(1, index.clamp_(max=rows.values.shape[1] - 1)).to(torch.float64)


def _clusters(rows: SortedRows, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance and moment `[rows, k]` of each centre's cluster."""
    middles = ((centres[:, 1:] + centres[:, :-1]) / 2).to(torch.float32)
    borders = torch.searchsorted(rows.values, middles.contiguous())
    first = torch.zeros_like(borders[:, :1])
    edges = torch.cat([first, borders, torch.full_like(first, rows.values.shape[1])], dim=1)
    return rows.mass.gather(1, edges).diff(dim=1), rows.moment.gather(1, edges).diff(dim=1)


def _iterate(rows: SortedRows, centres: torch.Tensor) -> torch.Tensor:
    """Move each centre to the mean of its cluster until none moves; an empty one stays."""
    for _ in range(ITERATIONS):
        mass, moment = _clusters(rows, centres)
        moved = torch.where(mass > 0, moment / mass, centres)
        # Means of adjacent clusters are ordered up to rounding of the prefix sums.
        moved = moved.cummax(dim=1).values
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def _gain(rows: SortedRows, centres: torch.Tensor) -> torch.Tensor:
    """Reduction of the weighted sum of squares by the centres, `[rows]`; more is better."""
    mass, moment = _clusters(rows, centres)
    return (2 * centres * moment - centres.square() * mass).sum(dim=1)
