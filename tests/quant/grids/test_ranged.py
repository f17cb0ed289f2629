"""The search of ranges: C finds those of torch to the bit, and none that is worse than minimum to maximum."""

from __future__ import annotations

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.quant.kinds.base.ranged import RangedGrid, native_ranges
from llmopt.quant.kinds.ggml.kind import SIMPLE, SimpleBlockGrid
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.integer.kind import IntGrid
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.native_paths import native_paths

WIDTH = 240
GRIDS = [
    *(
        pytest.param(IntGrid(scheme, WIDTH, dtype), id=f"{scheme.label} {dtype}")
        for bits, size, dtype in (
            (2, 16, torch.float32),
            (3, 120, torch.bfloat16),
            (4, 48, torch.float16),
            (8, WIDTH, torch.float32),
        )
        for scheme in (IntScheme(bits, size, True), IntScheme(bits, size, False))
    ),
    *(pytest.param(SimpleBlockGrid(GgufScheme(name)), id=name) for name in SIMPLE),
]


def groups_of(grid: RangedGrid) -> tuple[torch.Tensor, torch.Tensor]:
    """Values with a group of zeros, one of a single value and a huge one, and importance."""
    generator = torch.Generator().manual_seed(3)
    width = WIDTH // grid.group * grid.group
    values = torch.randn(9, width // grid.group, grid.group, generator=generator)
    values[1], values[2], values[3, :, 0] = 0, -0.25, 3e4
    return values, torch.rand(values.shape[1:], generator=generator)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("path", native_paths())
def test_ranges_are_those_of_torch_to_the_bit(
    path: str, grid: RangedGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, path)
    assert native_ranges().library is not None or path == "off"
    found = grid.fit(*groups_of(grid))
    monkeypatch.setenv(VARIABLE, "off")
    for part, wanted in zip(found, grid.fit(*groups_of(grid)), strict=True):
        torch.testing.assert_close(part, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("grid", GRIDS)
def test_no_group_has_more_error_than_with_its_whole_range(grid: RangedGrid) -> None:
    values, importance = groups_of(grid)

    def errors(parameters: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return ((grid.round(values, parameters) - values).square() * importance).sum(dim=-1)

    found = errors(grid.fit(values, importance))
    whole = errors(grid.ranges(*values.aminmax(dim=-1)))
    assert (found <= whole * (1 + 1e-5)).all()
    usual = slice(4, None)
    assert found[usual].sum() < 0.98 * whole[usual].sum()
