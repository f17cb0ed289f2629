"""Grids with a range for each group of a row, and the search for the best ones.

Several ranges are tried for least weighted error, and steps are refitted to the best one's codes, as in
llama.cpp's `make_qx_quants` and `make_qkx3_quants`. `ranged.c` sums on a CPU, to the same bits as torch
there.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from typing import Any, NamedTuple

import torch

from ....base.build import beside, fields
from ...base.device import HOST, rows_at_once
from ...base.sums import folded
from .grid import Affine, Edge, Parameters, ScalarGrid, where

_TOGETHER = tuple(1.1 - 0.05 * step for step in range(15))  # 1.1 .. 0.4
_ALONE = (1.1, 1.2, 0.9, 0.8, 0.7, 0.6)
_REFITS = 3
_VALUES = 2**17  # weights per chunk: small enough to stay in a core's cache


class Line(NamedTuple):
    """Lines `[rows, groups]` through weights against levels, and through the mean level and value, or 0."""

    numerator: torch.Tensor
    denominator: torch.Tensor
    level: torch.Tensor | float = 0.0
    value: torch.Tensor | float = 0.0

    def slope(self, without: torch.Tensor) -> torch.Tensor:
        slope = self.numerator / self.denominator
        return torch.where(torch.isfinite(slope) & (slope != 0), slope, without)

    def offset(self, slope: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
        offset = self.value - self.level * slope
        return torch.where(torch.isfinite(offset), offset, without)


class RangedGrid(ScalarGrid):
    """A scalar grid with one range for each group of a row."""

    two_ends: bool = False  # the least and the largest weight can be clipped apart
    of_integers: bool = True  # levels are all integers between the ends of the affine

    @abstractmethod
    def ranges(self, low: torch.Tensor, high: torch.Tensor) -> Parameters:
        """Parameters that span `low` to `high`, float32 `[..., out, groups]`."""

    @abstractmethod
    def refitted(self, line: Line, parameters: Parameters) -> Parameters:
        """Parameters of least squared error for their codes; `line`: of weights against levels."""

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        """Parameters from minimum to maximum, or of least weighted error of those that are tried."""
        if importance is None:
            return self.ranges(*values.aminmax(dim=-1))
        at_once = rows_at_once(values.device, _VALUES, values[0].numel())
        fitted = [_Search(self, rows, importance).run() for rows in values.split(at_once)]
        return tuple(torch.cat(parts) for parts in zip(*fitted, strict=True))


class _Search:
    """The search of some rows `[rows, groups, group]`."""

    def __init__(self, grid: RangedGrid, values: torch.Tensor, importance: torch.Tensor):
        self.grid, self.sums = grid, _sums(grid, values, importance)
        self.low, self.high = values.aminmax(dim=-1)
        self.best = grid.ranges(self.low, self.high)
        self.least = self.sums.errors(_one(self.best))[0]
        self.ends = torch.ones_like(self.low), torch.ones_like(self.high)

    def run(self) -> Parameters:
        together, alone = (
            torch.tensor(values, device="cpu").view(-1, 1, 1).to(self.low.device)
            for values in (_TOGETHER, _ALONE)
        )
        self.try_ends(together, together)
        if self.grid.two_ends:
            self.try_ends(self.ends[0] * alone, self.ends[1])
            self.try_ends(self.ends[0], self.ends[1] * alone)
        for _ in range(_REFITS):
            refitted = self.grid.refitted(self.sums.line(self.best), self.best)
            error = self.sums.errors(_one(refitted))[0]
            better = error < self.least
            self.least = torch.where(better, error, self.least)
            self.best = where(better, refitted, self.best)
        return self.best

    def try_ends(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Try shares of the two ends, several `[tries, ...]` for each group."""
        low, high = (
            part.expand(-1, *self.low.shape) for part in torch.broadcast_tensors(low, high)
        )
        tried = self.grid.ranges(self.low * low, self.high * high)
        error, index = self.sums.errors(tried).min(dim=0)
        better, index = error < self.least, index.unsqueeze(0)
        self.least = torch.where(better, error, self.least)
        best = tuple(part.gather(0, index).squeeze(0) for part in tried)
        self.best = where(better, best, self.best)
        ends = (part.gather(0, index).squeeze(0) for part in (low, high))
        first, second = (torch.where(better, *pair) for pair in zip(ends, self.ends, strict=True))
        self.ends = first, second


def _one(parameters: Parameters) -> Parameters:
    return tuple(part.unsqueeze(0) for part in parameters)


class _Sums:
    """Sums over groups `[rows, groups, group]`, by torch."""

    def __init__(self, grid: RangedGrid, values: torch.Tensor, importance: torch.Tensor):
        self.grid, self.values, self.importance = grid, values, importance

    def errors(self, tried: Parameters) -> torch.Tensor:
        """Weighted squared errors `[tries, rows, groups]` of parameters `[tries, rows, groups, ...]`."""
        # One after the other on the host, in whose cache rows stay; on a device at once, with fewer launches
        if self.values.device == HOST:
            return torch.stack([self._error(parts) for parts in zip(*tried, strict=True)])
        return self._error(tried)

    def _error(self, parameters: Parameters) -> torch.Tensor:
        affine, runs = self.grid.by_run(self.values, parameters)
        lost = self.grid.scaled_levels(runs, affine)
        if lost.device == HOST:  # each product rounded, as in C
            torch.sub(runs, lost.mul_(affine.step), out=lost)
        else:
            torch.addcmul(runs, lost, affine.step, value=-1, out=lost)
        if affine.offset is not None:
            lost.sub_(affine.offset)
        lost = lost.view(*lost.shape[:-4], *self.values.shape)
        return folded(lost.mul_(lost).mul_(self.importance)).squeeze(-1)

    def line(self, parameters: Parameters) -> Line:
        """The line of least squares through the weights against their levels."""
        values, importance = self.values, self.importance
        levels, means = self.grid.levels(values, parameters), ()
        if self.grid.two_ends:
            total = folded(importance)
            means = tuple(folded(part * importance) / total for part in (levels, values))
            levels, values = levels - means[0], values - means[1]
        weighted = levels * importance
        sums = folded(weighted * values), folded(weighted * levels), *means
        return Line(*(part.squeeze(-1) for part in sums))


class _RangeCall(ctypes.Structure):
    """`RangeCall` of `ranged.c`."""

    _fields_ = fields(
        "values importance steps offsets lows highs sums", "rows width groups tries centred threads"
    )


native_ranges = beside(__file__, "ranged.c")
"""The compiled sums, or the reason why there are none."""


class _NativeSums:
    """`_Sums` of integers on a CPU, in C."""

    def __init__(
        self, library: Any, grid: RangedGrid, values: torch.Tensor, importance: torch.Tensor
    ):
        self.library, self.grid = library, grid
        self.values, self.importance = values.contiguous(), importance.contiguous()

    def errors(self, tried: Parameters) -> torch.Tensor:
        affine = self.grid.affine(tried)
        sums = torch.empty(affine.step.shape[:-1])
        self._call(self.library.llmopt_range_errors, affine, sums)
        return sums

    def line(self, parameters: Parameters) -> Line:
        sums = torch.empty(*self.values.shape[:-1], 4)
        self._call(self.library.llmopt_range_line, self.grid.affine(_one(parameters)), sums)
        return Line(*sums.unbind(-1))

    def _call(self, function: ctypes._NamedFuncPointer, affine: Affine, sums: torch.Tensor) -> None:
        def spread(edge: Edge) -> torch.Tensor:
            assert edge is not None
            part = edge if isinstance(edge, torch.Tensor) else torch.full((), float(edge))
            return part.expand(affine.step.shape).contiguous()

        parts = affine.step.contiguous(), affine.offset, spread(affine.low), spread(affine.high)
        rows, groups, width = self.values.shape
        call = _RangeCall(
            self.values.data_ptr(),
            self.importance.data_ptr(),
            *(None if part is None else part.data_ptr() for part in parts),
            sums.data_ptr(),
            rows * groups,
            width,
            groups,
            len(affine.step),
            self.grid.two_ends,
            torch.get_num_threads(),
        )
        if function(ctypes.byref(call)):
            raise MemoryError(f"no memory for a group of {width} weights")


def _sums(grid: RangedGrid, values: torch.Tensor, importance: torch.Tensor) -> _Sums | _NativeSums:
    takes = grid.of_integers and values.device == HOST and values.dtype is torch.float32
    if takes and (library := native_ranges().library):
        return _NativeSums(library, grid, values, importance)
    return _Sums(grid, values, importance)
