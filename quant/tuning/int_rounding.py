"""Learned rounding and ranges of one linear on an integer grid, updated by the signs of gradients.

A weight is rounded to `s (clamp(round(w / s + v) + z) - z)`: `v` moves it by up to half a step, and the
group's range is its smallest and largest weight, each times a share between 0 and 1, which give `s` and `z`.
Gradients pass through the rounding as if it were not there (straight-through estimator), so that they follow
from that of the rounded weight, without a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kinds.integer.kind import IntTensor, sequential_groups
from ..kinds.integer.scheme import IntScheme

_VALUES = 2**16  # weights at a time: small enough to stay in a core's cache


class _Grid(NamedTuple):
    """Scale in the stored dtype `[groups]`, and scale and zero code in float32 `[groups, 1]`."""

    stored: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


class IntRounding:
    """The tuned parameters of a linear.

    Args:
        weight: float32 `[out, in]`; it is read again in every step.
        scale_dtype: in which the format stores scales.
        start: the weight rounded to nearest, in whose ranges the descent begins, as far as they are within
            those of the weights; None: it begins with those of the weights.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scheme: IntScheme,
        scale_dtype: torch.dtype,
        start: IntTensor | None = None,
    ):
        self._shape, self._scheme, self._dtype = weight.shape, scheme, scale_dtype
        size = weight.shape[1] // scheme.num_groups(weight.shape[1])
        self._groups = weight.contiguous().view(-1, size)
        low, high = self._groups.aminmax(dim=1)
        self._low, self._high = low.clamp_(max=0), high.clamp_(min=0)
        self._offset = torch.zeros_like(self._groups)
        self._low_share, self._high_share = torch.ones_like(low), torch.ones_like(high)
        if start is not None:
            self._begin(start)
        self._kept = self._offset.clone(), self._low_share.clone(), self._high_share.clone()

    def _begin(self, start: IntTensor) -> None:
        """Take the ranges of a rounded weight: from its lowest code to its highest."""
        scales, zeros = (part.to(torch.float32).view(-1) for part in (start.scales, start.zeros))
        if self._scheme.symmetric:  # both ends alike: the larger one stays so, and sets the scale
            ends = (torch.maximum(-self._low, self._high),) * 2
            reached = (scales * self._scheme.middle,) * 2
        else:
            ends = self._low, self._high
            reached = -zeros * scales, (self._scheme.max_code - zeros) * scales
        for share, end, code in zip(
            (self._low_share, self._high_share), ends, reached, strict=True
        ):
            share.copy_(torch.where(end == 0, 1.0, code / end).clamp_(0, 1))

    def keep(self) -> None:
        """Remember the present parameters."""
        present = self._offset, self._low_share, self._high_share
        for kept, value in zip(self._kept, present, strict=True):
            kept.copy_(value)

    def recall(self) -> None:
        """Go back to the parameters that were kept last; those of rounding to nearest at first."""
        self._offset, self._low_share, self._high_share = self._kept

    def write(self, into: torch.Tensor) -> None:
        """The rounded weight in `into` `[out, in]`, in its dtype."""
        target = into.view(self._groups.shape)
        for rows in self._chunks():
            grid = self._grid(rows)
            codes = self._codes(rows, grid)
            target[rows] = codes.sub_(grid.zero).mul_(grid.scale)

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """One step of sign gradient descent.

        Args:
            gradient: of the loss, for the rounded weight `[out, in]`.
            rate: length of the step: in steps of the grid, and in shares of the range.
        """
        grouped = gradient.view(self._groups.shape)
        for rows in self._chunks():
            self._descend(rows, grouped[rows].to(torch.float32), rate)

    def tensor(self) -> IntTensor:
        """The quantized weight."""
        codes = torch.empty(self._groups.shape, dtype=torch.uint8)
        grids = []
        for rows in self._chunks():
            grids.append(self._grid(rows))
            codes[rows] = self._codes(rows, grids[-1]).to(torch.uint8)
        out_features, in_features = self._shape
        permuted = self._scheme.permuted
        return IntTensor(
            codes=codes.view(self._shape),
            scales=torch.cat([grid.stored for grid in grids]).view(out_features, -1),
            zeros=torch.cat([grid.zero for grid in grids]).view(out_features, -1).to(torch.uint8),
            scheme=self._scheme,
            group_index=sequential_groups(self._scheme, in_features) if permuted else None,
        )

    def _chunks(self) -> list[slice]:
        at_once = max(1, _VALUES // self._groups.shape[1])
        return [slice(start, start + at_once) for start in range(0, self._groups.shape[0], at_once)]

    def _range(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self._low[rows] * self._low_share[rows], self._high[rows] * self._high_share[rows]

    def _grid(self, rows: slice) -> _Grid:
        """Symmetric: the larger end of the range gets the code 0, which is one step farther from zero than
        the largest code; where that is the positive end, the scale is negative."""
        low, high = self._range(rows)
        if self._scheme.symmetric:
            scales = torch.where(-low > high, -low, -high) / self._scheme.middle
        else:
            scales = (high - low) / self._scheme.max_code
        stored = scales.to(self._dtype)
        # An all-zero group, or one too small for the dtype, is exactly zero under any finite scale.
        stored = torch.where(stored == 0, torch.ones_like(stored), stored)
        scale = stored.to(torch.float32)
        if self._scheme.symmetric:
            zero = torch.full_like(scale, self._scheme.middle)
        else:
            zero = torch.round(-low / scale).clamp_(0, self._scheme.max_code)
        return _Grid(stored, scale[:, None], zero[:, None])

    def _codes(self, rows: slice, grid: _Grid) -> torch.Tensor:
        steps = (self._groups[rows] / grid.scale).add_(self._offset[rows]).round_()
        return steps.add_(grid.zero).clamp_(0, self._scheme.max_code)

    def _descend(self, rows: slice, gradient: torch.Tensor, rate: float) -> None:
        grid = self._grid(rows)
        steps = self._groups[rows] / grid.scale
        wanted = (steps + self._offset[rows]).round_().add_(grid.zero)
        codes = wanted.clamp(0, self._scheme.max_code)
        inside = codes == wanted
        if self._scheme.symmetric:
            # d w'/d s: what rounding added to the code, and all of the code where it is clamped.
            by_scale = (codes.sub_(grid.zero).sub_(steps.mul_(inside))).mul_(gradient).sum(dim=1)
            self._descend_symmetric(rows, by_scale, rate)
        else:
            self._descend_ends(rows, gradient, codes, wanted, steps, grid, rate)
        sign = gradient.sign_().mul_(inside)
        if self._scheme.symmetric:
            sign.mul_(grid.scale.sign())
        self._offset[rows].sub_(sign, alpha=rate).clamp_(-0.5, 0.5)

    def _descend_symmetric(self, rows: slice, by_scale: torch.Tensor, rate: float) -> None:
        """Only the end of the range that sets the scale has a gradient."""
        low, high = self._range(rows)
        sign = by_scale.sign_()
        of_low = -low > high
        for share, step in (
            (self._low_share, torch.where(of_low, sign, 0.0)),
            (self._high_share, torch.where(of_low, 0.0, -sign)),
        ):
            share[rows].sub_(step, alpha=rate).clamp_(0, 1)

    def _descend_ends(
        self,
        rows: slice,
        gradient: torch.Tensor,
        codes: torch.Tensor,
        wanted: torch.Tensor,
        steps: torch.Tensor,
        grid: _Grid,
        rate: float,
    ) -> None:
        """Asymmetric: a weight beyond an end is that end, up to the rounding of the zero code; one inside
        depends on both, through the scale."""
        below, above = wanted < 0, wanted > self._scheme.max_code
        exact = -self._range(rows)[0][:, None] / grid.scale
        by_step = torch.where(below | above, exact - grid.zero, codes - grid.zero - steps)
        by_scale = by_step.mul_(gradient).sum(dim=1) / self._scheme.max_code
        by_low = (gradient * below).sum(dim=1) - by_scale
        by_high = (gradient * above).sum(dim=1) + by_scale
        for share, end, slope in (
            (self._low_share, self._low, by_low),
            (self._high_share, self._high, by_high),
        ):
            share[rows].sub_((end[rows] * slope).sign_(), alpha=rate).clamp_(0, 1)
