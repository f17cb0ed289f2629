from __future__ import annotations

import pytest
import torch
from llmopt.quant.smoothing.rotate import block_rotation, hadamard, random_rotation


@pytest.mark.parametrize(
    "order", [1, 2, 4, 12, 20, 24, 28, 36, 44, 60, 64, 108, 140, 576, 896, 960]
)
def test_hadamard_matrices_have_orthogonal_rows_of_signs(order: int) -> None:
    matrix = hadamard(order)
    assert matrix is not None
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [6, 30, 52, 100, 172])
def test_orders_without_a_construction(order: int) -> None:
    """Two of them have Hadamard matrices, by other constructions; no order that is no multiple of 4 has."""
    assert hadamard(order) is None


@pytest.mark.parametrize("order", [30, 64, 576])
def test_rotations_are_orthogonal_and_drawn_by_the_seed(order: int) -> None:
    first, again, other = (random_rotation(order, seed) for seed in (1, 1, 2))
    identity = torch.eye(order, dtype=torch.float64)
    torch.testing.assert_close(first @ first.T, identity, rtol=0, atol=1e-12)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(("order", "size"), [(576, 64), (96, 32), (48, 16), (40, 40)])
def test_blocks_are_of_channels_that_are_alike(order: int, size: int) -> None:
    loudness = torch.rand(order, generator=torch.Generator().manual_seed(0))
    rotation, identity = block_rotation(loudness, 7), torch.eye(order, dtype=torch.float64)
    matrix = rotation.columns(identity)
    assert torch.allclose(matrix.T @ matrix, identity, atol=1e-12)
    assert torch.equal(rotation.rows(identity), matrix.T)
    ranks = loudness.argsort().argsort()
    for channel in range(order):
        turned = matrix[channel].nonzero().flatten() // size
        assert set(turned.tolist()) == {int(ranks[channel]) // size}
