"""Random Hadamard matrices as rotations: signs that are random, entries that are all equally large.

A Hadamard matrix of order `m * 2**k` is the Kronecker product of Sylvester's of order `2**k` and one of order
`m` by Paley's constructions (R. E. A. C. Paley, "On Orthogonal Matrices", 1933). Orders without one get a
random orthogonal matrix.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_BLOCK, _LEAST_BLOCK = 64, 16


def random_rotation(order: int, seed: int) -> torch.Tensor:
    """An orthogonal matrix `[order, order]`, float64: `H D / sqrt(order)`, with random signs `D`."""
    generator = torch.Generator().manual_seed(seed)
    matrix = hadamard(order)
    if matrix is None:
        noise = torch.randn(order, order, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(noise).Q
    signs = torch.randint(0, 2, (order,), generator=generator).mul_(2).sub_(1)
    return matrix * signs / order**0.5


class BlockRotation(NamedTuple):
    """An orthogonal matrix that turns blocks of channels, each by itself.

    Attributes:
        channels: int64 `[order]`; block `k` takes `size` of them, from `k * size` on, to the same columns.
        blocks: float64 `[order / size, size, size]`.
    """

    channels: torch.Tensor
    blocks: torch.Tensor

    def columns(self, matrix: torch.Tensor) -> torch.Tensor:
        """`matrix @ R` for `matrix` `[rows, order]`."""
        parts = matrix.index_select(1, self.channels).unflatten(1, self.blocks.shape[:2])
        return torch.einsum("rki,kij->rkj", parts, self.blocks.to(matrix.dtype)).flatten(1)

    def rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """`R.T @ matrix` for `matrix` `[order, ...]`."""
        parts = matrix.index_select(0, self.channels).unflatten(0, self.blocks.shape[:2])
        turned = torch.einsum("ki...,kij->kj...", parts, self.blocks.to(matrix.dtype))
        return turned.flatten(0, 1)


def block_rotation(loudness: torch.Tensor, seed: int) -> BlockRotation:
    """Random rotations of blocks of 64 channels of like `loudness` `[order]`.

    An order that 64 does not divide has blocks of the largest power of two that divides it, of 16 at least;
    any other is one block.
    """
    order = len(loudness)
    size = math.gcd(order, _BLOCK)
    size = size if size >= _LEAST_BLOCK else order
    blocks = [random_rotation(size, seed + 2 * number) for number in range(order // size)]
    return BlockRotation(loudness.sort(stable=True).indices, torch.stack(blocks))


def hadamard(order: int) -> torch.Tensor | None:
    """A Hadamard matrix of ones and minus ones, float64; None where no construction here has the order."""
    base, doublings = order, 0
    while (factor := _base(base)) is None and base % 2 == 0:
        base, doublings = base // 2, doublings + 1
    if factor is None:
        return None
    for _ in range(doublings):
        factor = torch.cat([torch.cat([factor, factor], 1), torch.cat([factor, -factor], 1)])
    return factor


def _base(order: int) -> torch.Tensor | None:
    """A matrix of order 1, or by Paley's first or second construction."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 4 == 0 and _is_prime(order - 1) and (order - 1) % 4 == 3:
        return _skew(order - 1) + torch.eye(order, dtype=torch.float64)
    half = order // 2
    if order % 4 == 0 and _is_prime(half - 1) and (half - 1) % 4 == 1:
        symmetric = _bordered(half - 1, 1.0)
        on = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        off = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(symmetric, on) + torch.kron(torch.eye(half, dtype=torch.float64), off)
    return None


def _skew(prime: int) -> torch.Tensor:
    return _bordered(prime, -1.0)


def _bordered(prime: int, sign: float) -> torch.Tensor:
    """The Jacobsthal matrix of quadratic residues, with a border of ones; `sign` of the left one."""
    squares = {number * number % prime for number in range(1, prime)}
    residues = [0.0] + [1.0 if number in squares else -1.0 for number in range(1, prime)]
    rows = [[residues[(row - column) % prime] for column in range(prime)] for row in range(prime)]
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 1:] = torch.tensor(rows, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = sign
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))
