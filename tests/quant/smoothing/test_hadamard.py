from __future__ import annotations

import pytest
import torch
from llmopt.quant.smoothing.rotate import hadamard, random_rotation


@pytest.mark.parametrize(
    "order", [1, 2, 4, 12, 20, 24, 44, 60, 64, 80, 96, 108, 128, 140, 576, 896, 960]
)
def test_hadamard_matrices_have_orthogonal_rows_of_signs(order: int) -> None:
    matrix = hadamard(order)
    assert matrix is not None
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [6, 28, 30, 52, 100, 172])
def test_orders_without_a_construction(order: int) -> None:
    """Some of them have Hadamard matrices, by other constructions; no order that is no multiple of 4 has."""
    assert hadamard(order) is None


@pytest.mark.parametrize("order", [30, 64, 112, 576])
def test_rotations_are_orthogonal_and_drawn_by_the_seed(order: int) -> None:
    first, again, other = (random_rotation(order, seed) for seed in (1, 1, 2))
    identity = torch.eye(order, dtype=torch.float64)
    torch.testing.assert_close(first @ first.T, identity, rtol=0, atol=1e-12)
    assert torch.equal(first, again) and not torch.equal(first, other)
