"""`Grid`: the points that a scheme can store, as a solver sees them: fit a group, round its columns.

A *solver* (nearest, GPTQ's error feedback, signed gradient descent) decides which point each weight takes;
a *grid* knows the points. A weight `[out, in]` is divided into groups of consecutive input channels. A group
is fitted as a whole (an integer group, 16 or 32 weights of FP4, the 256 of a K-quant with its sub-blocks, the
row of an e4m3 channel), which gives *parameters*: scales, zero codes, absmax values, as they are stored. Its
columns are then rounded one by one, or `vector` at a time where the grid is one of vectors (a lattice, a
trellis).

Codes are not kept while solving: `tensor` finds them again from values and parameters; but for a trellis,
whose states cannot be told from their values, and whose grid belongs to one weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from ..tensors.base import QuantizedTensor

Parameters = tuple[torch.Tensor, ...]
"""What was fitted to groups: each `[out, groups, ...]`; of a grid with one group any shape."""


class Columns(Protocol):
    """The points of one fitted group, laid out for rounding its columns one after another."""

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        """Write `weights` less the nearest points to `targets` into `out`, all float32 `[vector, out]`.

        The two differ by what earlier columns' errors added to the targets.

        Args:
            first: the channel of the group that the first of these columns is.
        """
        ...


class Grid(ABC):
    """The grid of one weight `[out, in]`.

    Attributes:
        group: consecutive input channels that are fitted together; it divides `in`.
        vector: consecutive columns that are rounded together; it divides `group`. 1: a scalar grid.
        rows_alone: whether no parameter is shared by rows, so that weights with one input can be
            concatenated along `out` and solved as one.
    """

    group: int
    vector: int = 1
    rows_alone: bool = True

    @abstractmethod
    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        """Parameters of groups, for least squared error.

        Args:
            values: float32 `[out, groups, group]`: all groups of the weight, or some.
            importance: float32 `[groups, group]`, weight of each channel's squared error, not negative;
                None: the plain range, minimum to maximum, or what the format's owner does without data.
        """

    @abstractmethod
    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """The nearest points to `values` `[out, groups, group]`, of the same shape: dequantized weights."""

    @abstractmethod
    def columns(self, parameters: Parameters) -> Columns:
        """The points of one group, whose parameters are `[out, 1, ...]`."""

    @abstractmethod
    def tensor(self, values: torch.Tensor, parameters: Parameters) -> QuantizedTensor:
        """The quantized weight.

        Args:
            values: float32 `[out, in]`: points of the grid, up to the last places of a float.
            parameters: of all groups.
        """

    def nearest(
        self, weight: torch.Tensor, importance: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Round a weight `[out, in]` to nearest; `importance` `[in]` as in `fit`.

        Raises:
            BadInput: weights beyond what the scales can hold.
        """
        grouped = weight.unflatten(1, (-1, self.group))
        spread = None if importance is None else importance.view(-1, self.group)
        parameters = self.fit(grouped, spread)
        return self.tensor(self.round(grouped, parameters).flatten(1), parameters)


def joined(fitted: Sequence[Parameters]) -> Parameters:
    """The parameters of consecutive groups as one."""
    if len(fitted) == 1:
        return fitted[0]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*fitted, strict=True))


def group_of(parameters: Parameters, index: int) -> Parameters:
    """The parameters of one group, `[out, 1, ...]`."""
    return tuple(part[:, index : index + 1] for part in parameters)


def where(mask: torch.Tensor, first: Parameters, second: Parameters) -> Parameters:
    """`first` where the mask `[out, groups]` (or with more dimensions) is set, `second` elsewhere."""
    return tuple(
        torch.where(mask.view(*mask.shape, *(1,) * (one.dim() - mask.dim())), one, other)
        for one, other in zip(first, second, strict=True)
    )
