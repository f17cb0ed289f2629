"""`Grid`: the points that a scheme can store, as a solver sees them: fit a group, round its columns.

A *solver* (nearest, GPTQ's error feedback, signed gradient descent) decides which point each weight takes.
Groups of consecutive input channels are fitted as a whole, which gives *parameters*: scales, zero codes,
absmax values, as stored. Columns are then rounded one by one, or `vector` at a time (a lattice, a trellis).
`tensor` finds codes again from values and parameters, but for a trellis, whose grid belongs to one weight.

*Scalar* grids have points `level * step + offset` for every weight; *ranged* ones can search ranges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import torch

from .tensor import QuantizedTensor

Parameters = tuple[torch.Tensor, ...]
"""Scales and the like, fitted to groups: each `[out, groups, ...]`; of a grid with one group any shape."""


class Columns(Protocol):
    """The points of one fitted group, laid out for rounding its columns one after another."""

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        """Write `weights` less the nearest points to `targets` into `out`, all float32 `[vector, out]`. The
        two differ by the errors of earlier columns. `first` is the first column's channel of the group."""
        ...


class Grid(ABC):
    """The grid of one weight `[out, in]`.

    Attributes:
        group: consecutive input channels that are fitted together; it divides `in`.
        vector: consecutive columns that are rounded together; it divides `group`. 1: a scalar grid.
        rows_alone: True if no parameter is shared by rows, so that weights with one input can be
            concatenated along `out` and solved as one.
    """

    group: int
    vector: int = 1
    rows_alone: bool = True

    @abstractmethod
    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        """Parameters of groups `[out, groups, group]` of least error, weighted by `importance` >= 0 `[groups,
        group]`; None: minimum to maximum, or the rule of the format's owner."""

    @abstractmethod
    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """The nearest points to `values` `[out, groups, group]`, of the same shape: dequantized weights."""

    @abstractmethod
    def columns(self, parameters: Parameters) -> Columns:
        """The points of one group, whose parameters are `[out, 1, ...]`."""

    @abstractmethod
    def tensor(self, values: torch.Tensor, parameters: Parameters) -> QuantizedTensor:
        """The quantized weight of `values` `[out, in]`, points of the grid up to a float's last places."""

    def nearest(
        self, weight: torch.Tensor, importance: torch.Tensor | None = None
    ) -> QuantizedTensor:
        parameters, grouped = self.fitted(weight, importance)
        return self.tensor(self.round(grouped, parameters).flatten(1), parameters)

    def fitted(
        self, weight: torch.Tensor, importance: torch.Tensor | None
    ) -> tuple[Parameters, torch.Tensor]:
        grouped = weight.unflatten(1, (-1, self.group))
        spread = None if importance is None else importance.view(-1, self.group)
        return self.fit(grouped, spread), grouped


def joined(fitted: Sequence[Parameters]) -> Parameters:
    if len(fitted) == 1:
        return fitted[0]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*fitted, strict=True))


def group_of(parameters: Parameters, index: int) -> Parameters:
    return tuple(part[:, index : index + 1] for part in parameters)


def where(mask: torch.Tensor, first: Parameters, second: Parameters) -> Parameters:
    """`first` where the mask `[out, groups]` (or with more dimensions) is set, `second` elsewhere."""
    return tuple(
        torch.where(mask.view(*mask.shape, *(1,) * (new.dim() - mask.dim())), new, old)
        for new, old in zip(first, second, strict=True)
    )


Edge = torch.Tensor | float | None


@dataclass(frozen=True, slots=True)
class Affine:
    """Steps (not 0) and offsets (None: 0) of runs, float32, and the extreme levels (None: a table's)."""

    step: torch.Tensor
    offset: torch.Tensor | None = None
    low: Edge = None
    high: Edge = None


class ScalarGrid(Grid):
    """A grid whose columns are rounded one by one."""

    @abstractmethod
    def affine(self, parameters: Parameters) -> Affine:
        """Steps and offsets, each `[out, groups, runs]`: a group is divided into `runs` of equal length."""

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        """Replace weights in units of the step, less the offset, by the nearest levels, here integers."""
        scaled.round_()
        if isinstance(affine.low, torch.Tensor) and isinstance(affine.high, torch.Tensor):
            # One broadcast operand at a time, or the loop is not vectorized.
            torch.maximum(scaled, affine.low, out=scaled)
            torch.minimum(scaled, affine.high, out=scaled)
        else:
            scaled.clamp_(affine.low, affine.high)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        affine, runs = self.by_run(values, parameters)
        points = self.scaled_levels(runs, affine).mul_(affine.step)
        if affine.offset is not None:
            points.add_(affine.offset)
        return points.view(values.shape)

    @abstractmethod
    def coded(self, levels: torch.Tensor, parameters: Parameters) -> QuantizedTensor:
        """The quantized weight of levels `[out, in]`, which may be overwritten."""

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> QuantizedTensor:
        return self.coded(self.levels(values, parameters), parameters)

    def nearest(
        self, weight: torch.Tensor, importance: torch.Tensor | None = None
    ) -> QuantizedTensor:
        parameters, grouped = self.fitted(weight, importance)
        return self.coded(self.levels(grouped, parameters).flatten(1), parameters)

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
        affine, runs = self.by_run(values, parameters)
        return self.scaled_levels(runs, affine).view(values.shape)

    def by_run(self, values: torch.Tensor, parameters: Parameters) -> tuple[Affine, torch.Tensor]:
        affine = _mapped(self.affine(parameters), lambda part: part.unsqueeze(-1))
        return affine, values.reshape(values.shape[0], *affine.step.shape[-3:-1], -1)


class ScalarColumns:
    """The points of one group of a scalar grid, its steps `[out]` contiguous for each run."""

    def __init__(self, grid: ScalarGrid, affine: Affine):
        self._grid, num_runs = grid, affine.step.shape[-1]
        transposed = _mapped(affine, lambda part: part.flatten(0, 1).T.contiguous())
        self._runs = [_mapped(transposed, itemgetter(run)) for run in range(num_runs)]
        self._length = grid.group // num_runs

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        affine = self._runs[first // self._length]
        self._grid.scaled_levels(targets, affine, out=out)
        torch.addcmul(weights, out, affine.step, value=-1, out=out)
        if affine.offset is not None:
            out.sub_(affine.offset)


def _mapped(affine: Affine, change: Callable[[torch.Tensor], torch.Tensor]) -> Affine:
    def changed(part: Edge) -> Edge:
        return change(part) if isinstance(part, torch.Tensor) else part

    offset = None if affine.offset is None else change(affine.offset)
    return Affine(change(affine.step), offset, changed(affine.low), changed(affine.high))


class Table:
    """Levels from a table, float32 `[levels]`, ascending."""

    def __init__(self, values: torch.Tensor):
        self.values = values
        self._middles = (values[1:] + values[:-1]) / 2

    def snap(self, scaled: torch.Tensor) -> None:
        """Replace by the nearest levels, NaN by the last; of two equally near by the lower."""
        scaled.copy_(self.values[torch.bucketize(scaled, self._middles, out_int32=True)])
