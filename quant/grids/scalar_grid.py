"""Scalar grids: every weight by itself is `level * step + offset`, with levels that are integers or a table.

Integers, e4m3, FP4 and NF4 tables and K-quants all are: they differ in the levels, and in how many weights
share a step. The points are computed the same way for whole weights and for a column in a solver's loop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import torch

from .base import Grid, Parameters

Edge = torch.Tensor | float | None


@dataclass(frozen=True, slots=True)
class Affine:
    """Steps and offsets of runs of weights, and the range of their levels; float32, broadcast to the weights.

    Attributes:
        step: not zero.
        offset: None: 0.
        low, high: the least and the largest level; None: those of the grid's table.
    """

    step: torch.Tensor
    offset: torch.Tensor | None = None
    low: Edge = None
    high: Edge = None


class ScalarGrid(Grid):
    """A grid whose columns are rounded one by one."""

    @abstractmethod
    def affine(self, parameters: Parameters) -> Affine:
        """Steps and offsets, each `[out, groups, runs]`: a group is divided into `runs` of equal length."""

    @abstractmethod
    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        """Replace weights in units of the step, less the offset, by the nearest levels."""

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        affine, runs = self._by_run(values, parameters)
        points = self.scaled_levels(runs, affine).mul_(affine.step)
        if affine.offset is not None:
            points.add_(affine.offset)
        return points.view(values.shape)

    def lost(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """The errors of rounding, `values - round(values)`, in fewer passes over them."""
        affine, runs = self._by_run(values, parameters)
        levels = self.scaled_levels(runs, affine)
        errors = torch.addcmul(runs, levels, affine.step, value=-1, out=levels)
        if affine.offset is not None:
            errors.sub_(affine.offset)
        return errors.view(values.shape)

    def columns(self, parameters: Parameters) -> ScalarColumns:
        return ScalarColumns(self, self.affine(parameters))

    def scaled_levels(
        self, values: torch.Tensor, affine: Affine, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The levels of the nearest points to `values`, to which the affine's tensors are broadcast."""
        if affine.offset is None:
            scaled = torch.div(values, affine.step, out=out)
        else:
            scaled = torch.sub(values, affine.offset, out=out).div_(affine.step)
        self.snap(scaled, affine)
        return scaled

    def levels(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """The levels of the nearest points, float32, to values `[out, in]` or `[out, groups, group]`."""
        affine, runs = self._by_run(values, parameters)
        return self.scaled_levels(runs, affine).view(values.shape)

    def _by_run(self, values: torch.Tensor, parameters: Parameters) -> tuple[Affine, torch.Tensor]:
        """The affine `[out, groups, runs, 1]`, and the values `[out, groups, runs, length]`."""
        affine = _mapped(self.affine(parameters), lambda part: part.unsqueeze(-1))
        return affine, values.reshape(values.shape[0], *affine.step.shape[1:3], -1)


class ScalarColumns:
    """The points of one group of a scalar grid, its steps `[out]` contiguous for each run."""

    def __init__(self, grid: ScalarGrid, affine: Affine):
        self._grid = grid
        num_runs = affine.step.shape[-1]
        transposed = _mapped(affine, lambda part: part.flatten(0, 1).T.contiguous())
        self._runs = [_mapped(transposed, itemgetter(run)) for run in range(num_runs)]
        self._length = grid.group // num_runs

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        """See `Columns.errors`."""
        affine = self._runs[first // self._length]
        self._grid.scaled_levels(targets, affine, out=out)
        torch.addcmul(weights, out, affine.step, value=-1, out=out)
        if affine.offset is not None:
            out.sub_(affine.offset)


def _mapped(affine: Affine, change: Callable[[torch.Tensor], torch.Tensor]) -> Affine:
    """The affine with its tensors changed."""

    def changed(part: Edge) -> Edge:
        return change(part) if isinstance(part, torch.Tensor) else part

    offset = None if affine.offset is None else change(affine.offset)
    return Affine(change(affine.step), offset, changed(affine.low), changed(affine.high))


def snap_to_integers(scaled: torch.Tensor, affine: Affine) -> None:
    """Round to integers between the affine's `low` and `high`."""
    scaled.round_()
    if isinstance(affine.low, torch.Tensor) and isinstance(affine.high, torch.Tensor):
        # One broadcast operand at a time, or the loop is not vectorized.
        torch.maximum(scaled, affine.low, out=scaled)
        torch.minimum(scaled, affine.high, out=scaled)
    else:
        scaled.clamp_(affine.low, affine.high)  # pyright: ignore[reportArgumentType, reportCallIssue]


class Table:
    """Levels from a table.

    Args:
        values: float32 `[levels]`, ascending.
    """

    def __init__(self, values: torch.Tensor):
        self.values = values
        self._middles = (values[1:] + values[:-1]) / 2

    def snap(self, scaled: torch.Tensor) -> None:
        """Replace by the nearest levels, NaN by the last; of two equally near by the lower."""
        scaled.copy_(self.values[torch.bucketize(scaled, self._middles, out_int32=True)])
