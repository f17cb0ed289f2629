"""Learned rounding of one linear on any grid, updated by the signs of gradients.

The groups are fitted once; a weight then goes to the point nearest to `w + v s`, where `v` is between -0.5
and 0.5 and `s` is the mean distance of points in the group, from what rounding changes its weights by.
"""

from __future__ import annotations

import torch

from ..kinds.base.grid import Grid
from ..kinds.base.tensor import QuantizedTensor


class GridRounding:
    """The tuned parameters of a linear; the gradient passes through the rounding (straight-through).

    Args:
        weight: float32 `[out, in]`; it is read again in every step.
        importance: float32 `[in]`, weight of each channel's squared error in the fit.
    """

    def __init__(self, weight: torch.Tensor, grid: Grid, importance: torch.Tensor | None):
        self._grid = grid
        self._groups = weight.unflatten(1, (-1, grid.group))
        spread = None if importance is None else importance.view(-1, grid.group)
        self._parameters = grid.fit(self._groups, spread)
        moved = grid.round(self._groups, self._parameters).sub_(self._groups)
        # An error that is evenly spread over a step has a twelfth of its square as variance.
        self._step = moved.square_().mean(dim=-1, keepdim=True).mul_(12).sqrt_()
        self._offset = torch.zeros_like(self._groups)
        self._kept = self._offset.clone()

    def keep(self) -> None:
        """Remember the present offsets."""
        self._kept.copy_(self._offset)

    def recall(self) -> None:
        """Go back to the offsets that were kept last; none at first."""
        self._offset = self._kept

    def write(self, into: torch.Tensor) -> None:
        """The rounded weight in `into` `[out, in]`, in its dtype."""
        into.copy_(self._values())

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """One step of sign gradient descent, for the gradient of the rounded weight `[out, in]`."""
        sign = gradient.unflatten(1, (-1, self._grid.group)).to(torch.float32).sign()
        self._offset.sub_(sign, alpha=rate).clamp_(-0.5, 0.5)

    def tensor(self) -> QuantizedTensor:
        """The quantized weight."""
        return self._grid.tensor(self._values(), self._parameters)

    def _values(self) -> torch.Tensor:
        moved = torch.addcmul(self._groups, self._offset, self._step)
        return self._grid.round(moved, self._parameters).flatten(1)
