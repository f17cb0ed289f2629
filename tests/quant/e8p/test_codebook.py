"""E8P against its definition, bit by bit, and its search against all 65,536 points."""

from __future__ import annotations

import hashlib

import pytest
import torch
from llmopt.quant.kinds.e8p.kind import (
    DIM,
    RESIDUAL_STEPS,
    Codes,
    nearest,
    nearest_codes,
    patterns,
    points,
    residual_points,
    values_of,
)

# SHA-256 of four times the points, and of twice the residual's, as int8: of the tables that QuIP-for-all's
# `get_full_grid` and `get_e81bgrid` make.
POINTS = "f8714b2f5eed229da139883e9b0ba4a2549251a04c753bf788ad0f0df6b094ff"
RESIDUAL = "37ce1a66345c1bbc51427c9e13e355558727bc02828e09f751b4d46fd7f816ec"


def digest(table: torch.Tensor, times: int) -> str:
    return hashlib.sha256((table * times).to(torch.int8).numpy().tobytes()).hexdigest()


def slow_point(code: int) -> list[float]:
    """A code a bit at a time: signs make the sum even but for those of a pattern, then the shift."""
    magnitudes, signs = patterns()[code >> 8].tolist(), code & 255
    shift = -0.25 if signs.bit_count() % 2 else 0.25
    signs ^= signs.bit_count() % 2
    if sum(magnitudes) % 2:
        magnitudes[7] = -magnitudes[7]
    bits = [7, 5, 6, 4, 3, 1, 2, 0]
    return [m * (-1) ** (signs >> bit & 1) + shift for m, bit in zip(magnitudes, bits, strict=True)]


def test_the_patterns_are_those_of_the_paper() -> None:
    norms = patterns().square().sum(dim=1)
    assert (norms <= 10).sum() == 227 and (norms == 12).sum() == 29
    assert len(patterns().unique(dim=0)) == 256
    assert torch.equal(patterns()[:227], patterns()[:227].unique(dim=0))  # lexicographic


def test_the_points_are_those_of_the_owner_and_of_the_slow_decoder() -> None:
    table = points()
    assert digest(table, 4) == POINTS and digest(residual_points(), 2) == RESIDUAL
    codes = [*range(0, 65536, 251), 1, 255, 65535]
    assert table[codes].tolist() == [slow_point(code) for code in codes]
    assert len(table.unique(dim=0)) == 65536
    assert not bool(((table - table[:, :1]) % 1).any())  # all of one coset: E8 + 1/4
    shift = torch.where(table[:, :1] % 1 == 0.75, 0.25, -0.25)
    assert not bool(((table - shift).sum(dim=1) % 2).any())


def test_every_point_is_nearest_to_itself() -> None:
    assert torch.equal(nearest_codes(points()), torch.arange(65536, dtype=torch.int32))


@pytest.mark.parametrize("spread", [0.3, 1.03, 3.0])
def test_the_search_finds_the_nearest_of_all_points(spread: float) -> None:
    targets = torch.randn(300, DIM, generator=torch.Generator().manual_seed(7)) * spread
    targets[0] = 0
    distances = torch.cdist(targets.double(), points().double())
    found = distances.gather(1, nearest_codes(targets).long()[:, None])[:, 0]
    assert torch.allclose(found, distances.amin(dim=1), atol=1e-6)


@pytest.mark.parametrize("bits", [3, 4])
def test_the_residual_is_the_nearest_to_what_is_left(bits: int) -> None:
    targets = torch.randn(200, DIM, generator=torch.Generator().manual_seed(3))
    found = nearest(targets, bits)
    assert found.residual is not None
    rest = targets - points()[found.codes.long()]
    table = (residual_points() if bits == 3 else points()) * RESIDUAL_STEPS[bits]
    error = (targets - values_of(found, bits)).norm(dim=1)
    assert torch.allclose(error, torch.cdist(rest, table).amin(dim=1), atol=1e-5)
    assert torch.equal(values_of(Codes(found.codes, None), 2), points()[found.codes.long()])
