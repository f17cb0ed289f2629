"""Ranges of groups, searched for the least squared error weighted by the importance of the channels.

Several ranges are tried, smaller and a little larger than minimum to maximum; where a group has two ends,
each is then tried by itself. From the best one, steps are refitted to its codes by least squares.
(llama.cpp's `make_qx_quants` and `make_qkx3_quants` do likewise, for 19 and 36 ranges.)
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from .base import Parameters, where
from .scalar_grid import ScalarGrid

_TOGETHER = tuple(1.1 - 0.05 * step for step in range(15))  # 1.1 .. 0.4
_ALONE = (1.1, 1.2, 0.9, 0.8, 0.7, 0.6)
_REFITS = 3
_VALUES = 2**17  # weights per chunk: small enough to stay in a core's cache


class RangedGrid(ScalarGrid):
    """A scalar grid with one range for each group of a row.

    Attributes:
        two_ends: whether the least and the largest weight can be clipped apart.
    """

    two_ends: bool = False

    @abstractmethod
    def ranges(self, low: torch.Tensor, high: torch.Tensor) -> Parameters:
        """Parameters that span `low` to `high`, float32 `[..., out, groups]`."""

    @abstractmethod
    def refitted(
        self, values: torch.Tensor, importance: torch.Tensor, parameters: Parameters
    ) -> Parameters:
        """The parameters of least squared error for the codes that these give, where there are such."""

    def searched(self, values: torch.Tensor, importance: torch.Tensor) -> Parameters:
        """Parameters of least weighted squared error of those that are tried; arguments as for `fit`."""
        at_once = max(1, _VALUES // values[0].numel())
        fitted = [_Search(self, rows, importance).run() for rows in values.split(at_once)]
        return tuple(torch.cat(parts) for parts in zip(*fitted, strict=True))


class _Search:
    """The search of some rows `[rows, groups, group]`."""

    def __init__(self, grid: RangedGrid, values: torch.Tensor, importance: torch.Tensor):
        self.grid, self.values, self.importance = grid, values, importance
        low, high = values.aminmax(dim=-1)
        self.low, self.high = low, high
        self.best = grid.ranges(low, high)
        self.least = self.error(self.best)
        self.ends = torch.ones_like(low), torch.ones_like(high)

    def _shares(self, values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, device="cpu").view(-1, 1, 1).to(self.values.device)

    def run(self) -> Parameters:
        shares = self._shares(_TOGETHER)
        self.try_ends(shares, shares)
        if self.grid.two_ends:
            shares = self._shares(_ALONE)
            self.try_ends(self.ends[0] * shares, self.ends[1])
            self.try_ends(self.ends[0], self.ends[1] * shares)
        for _ in range(_REFITS):
            self.take(self.grid.refitted(self.values, self.importance, self.best))
        return self.best

    def try_ends(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Try shares of the two ends, several `[tries, ...]` for each group."""
        low, high = (
            part.expand(-1, *self.low.shape) for part in torch.broadcast_tensors(low, high)
        )
        tried = self.grid.ranges(self.low * low, self.high * high)
        errors = [self.error(parts) for parts in zip(*tried, strict=True)]
        error, index = torch.stack(errors).min(dim=0)
        better, index = error < self.least, index.unsqueeze(0)
        self.least = torch.where(better, error, self.least)
        best = tuple(part.gather(0, index).squeeze(0) for part in tried)
        self.best = where(better, best, self.best)
        ends = (part.gather(0, index).squeeze(0) for part in (low, high))
        first, second = (torch.where(better, *pair) for pair in zip(ends, self.ends, strict=True))
        self.ends = first, second

    def take(self, candidate: Parameters) -> None:
        """Keep a candidate where it is better."""
        error = self.error(candidate)
        better = error < self.least
        self.least = torch.where(better, error, self.least)
        self.best = where(better, candidate, self.best)

    def error(self, parameters: Parameters) -> torch.Tensor:
        """Weighted squared error of each group `[rows, groups]`."""
        lost = self.grid.lost(self.values, parameters)
        lost.mul_(lost)
        if self.importance.shape[0] == 1:  # of a single group: one product with a vector
            return lost.flatten(0, 1).mv(self.importance[0]).unsqueeze(1)
        return lost.mul_(self.importance).sum(dim=-1)


def fitted_steps(
    values: torch.Tensor, levels: torch.Tensor, importance: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Steps `[out, groups]` of least error for levels `[out, groups, group]`; `steps` where there is none."""
    weighted = levels * importance
    fitted = (weighted * values).sum(dim=-1) / (weighted * levels).sum(dim=-1)
    return torch.where(torch.isfinite(fitted) & (fitted != 0), fitted, steps)


def fitted_line(
    values: torch.Tensor,
    levels: torch.Tensor,
    importance: torch.Tensor,
    steps: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with offsets: a line through values against levels."""
    total = importance.sum(dim=-1)
    level = (levels * importance).sum(dim=-1) / total
    value = (values * importance).sum(dim=-1) / total
    centred = values - value.unsqueeze(-1), levels - level.unsqueeze(-1)
    steps = fitted_steps(*centred, importance, steps)
    shifted = value - level * steps
    return steps, torch.where(torch.isfinite(shifted), shifted, offsets)
