"""Hadamard transforms of channels: in blocks of 128 (EXL3), or of a whole width, whatever it is (QuIP#).

A width `2^k m` with `m` odd has the Kronecker product of an orthogonal factor of order `m` and Sylvester's
Hadamard matrix of order `2^k`. No Hadamard matrix has an odd order above 1. QuIP# has tables of orders `4 m`,
QuIP-for-all draws the factor at random and stores it; this one is the discrete cosine transform's (DCT-II),
whose largest entry is sqrt(2) times the least that an orthogonal matrix can have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

BLOCK = 128


class Transform(Protocol):
    """An orthogonal transform of the last axis.

    Attributes:
        block: channels that are mixed with each other, which follow one another.
    """

    @property
    def block(self) -> int: ...

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Of values float32 `[..., width]`."""
        ...

    def backward(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of `forward`."""
        ...


class HadamardBlocks:
    """The transform of blocks of 128, which is its own inverse."""

    block = BLOCK

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """See `Transform`; 128 divides the width."""
        return (values.unflatten(-1, (-1, BLOCK)) @ sylvester(BLOCK, values.device)).flatten(-2)

    backward = forward


@dataclass(frozen=True, slots=True)
class HadamardTransform:
    """The transform of a whole width: of the odd factor in it, and of the power of two.

    Attributes:
        block: the width.
        factor: float32 `[m, m]`, orthogonal; None where the width is a power of two.
    """

    block: int
    factor: torch.Tensor | None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """`values @ (F ⊗ H)`, see `Transform`."""
        return self._transformed(values, None if self.factor is None else self.factor.mT)

    def backward(self, values: torch.Tensor) -> torch.Tensor:
        """`values @ (F ⊗ H)ᵀ`."""
        return self._transformed(values, self.factor)

    def _transformed(self, values: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        order = 1 if factor is None else len(factor)
        turned, size = values.reshape(-1, values.shape[-1]), self.block // order
        inner = 1
        while inner < size:  # H is a Kronecker product of small ones
            step = min(BLOCK, size // inner)
            turned = _on_axis(sylvester(step, values.device), turned, inner)
            inner *= step
        if factor is not None:
            turned = _on_axis(factor, turned, size)
        return turned.view(values.shape)


def whole_width(width: int) -> HadamardTransform:
    """The transform of a width, with the cosine transform where it is no power of two."""
    odd = width // (width & -width)
    return HadamardTransform(width, None if odd == 1 else cosine_factor(odd))


def cosine_factor(order: int) -> torch.Tensor:
    """The matrix of the DCT-II, orthonormal, float32 `[order, order]`."""
    angles = torch.arange(order, dtype=torch.float64)[:, None] * (torch.arange(order) + 0.5)
    matrix = torch.cos(angles * (math.pi / order)) * (2 / order) ** 0.5
    matrix[0] /= 2**0.5
    return matrix.to(torch.float32)


@lru_cache
def sylvester(order: int, device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix of a power of two, orthonormal, float32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / order**0.5).to(device)


def _on_axis(matrix: torch.Tensor, values: torch.Tensor, inner: int) -> torch.Tensor:
    """`matrix` applied to the axis of `values` `[rows, width]` that has `inner` channels inside of it."""
    if inner == 1:
        return (values.unflatten(1, (-1, len(matrix))) @ matrix.mT).flatten(1)
    return (matrix @ values.unflatten(1, (-1, len(matrix), inner))).flatten(1)
