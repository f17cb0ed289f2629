from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.quant.kinds.lookup.kind import fit_tables, sort_rows
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.methods.base import InputStatistics
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.methods.squeezellm import fit_lookup, input_sensitivity

from ...support.layer_problems import (
    correlated_inputs,
    heavy_weight,
    llama_layer,
    one_linear,
    relative_error,
    statistics_of,
)


def cost(values: torch.Tensor, importance: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Weighted squared error of each row with every value at its nearest centre, float64."""
    nearest = (values.double().unsqueeze(-1) - table.double().unsqueeze(1)).square().amin(dim=-1)
    return (nearest * importance.double()).sum(dim=1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from([2, 4, 8]), st.integers(0, 2**31))
def test_clusters_never_cost_more_than_their_start(
    rows: int, columns: int, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    importance = torch.rand(rows, columns, generator=generator) ** 4
    importance[:, ::5] = 0
    start = torch.linspace(-1, 1, count).expand(rows, count) * values.abs().amax()
    table = fit_tables(sort_rows(values, importance), start)
    assert bool((table.diff(dim=1) >= 0).all())
    assert bool(torch.isfinite(table).all())
    before, after = cost(values, importance, start), cost(values, importance, table)
    assert bool((after <= before * (1 + 1e-5) + 1e-9).all())


def test_clusters_that_are_there_are_found() -> None:
    """Four tight clumps of different importance: the centres are their weighted means."""
    clumps = torch.tensor([-5.0, -1.0, 0.5, 9.0])
    noise = torch.rand(4, 25, generator=torch.Generator().manual_seed(0)) * 0.1
    values = (clumps[:, None] + noise).flatten()[None]
    importance = torch.rand(1, 100, generator=torch.Generator().manual_seed(1)) + 0.1
    table = fit_tables(sort_rows(values, importance), torch.linspace(-5, 9, 4)[None])
    grouped = values.view(4, 25), importance.view(4, 25)
    expected = (grouped[0] * grouped[1]).sum(dim=1) / grouped[1].sum(dim=1)
    assert torch.allclose(table[0], expected, atol=1e-5)


def test_an_important_weight_gets_a_value_of_its_own() -> None:
    values = torch.linspace(-1, 1, 64)[None]
    importance = torch.ones(1, 64)
    importance[0, 40] = 1e6
    table = fit_tables(sort_rows(values, importance), torch.linspace(-1, 1, 4)[None])
    assert float((table - values[0, 40]).abs().min()) < 1e-4


def test_dead_columns_attract_hardly_any_centroid() -> None:
    inputs = correlated_inputs(256, 64)
    inputs[:, 10:20] = 0
    sensitivity = input_sensitivity(statistics_of(inputs))
    assert float(sensitivity.mean()) == pytest.approx(1, rel=1e-5)
    assert bool((sensitivity > 0).all())
    assert float(sensitivity[10:20].max()) < 0.01
    assert torch.equal(input_sensitivity(InputStatistics(8)), torch.ones(8))
    weight = heavy_weight(32, 64)
    weight[:, 10:20] *= 30  # loud weights that nothing reads
    statistics = statistics_of(inputs)
    fitted, rounded = fit_lookup(weight, statistics, LookupScheme(4))
    dead = relative_error(statistics, weight, fitted.dequantize())
    assert dead < 0.1 * relative_error(statistics, weight, rounded.dequantize())


@pytest.mark.parametrize("fraction", [0.0, 0.0045])
def test_error_falls_with_bits_and_no_row_is_worse_than_equal_steps(fraction: float) -> None:
    totals = []
    for bits in (2, 3, 4, 8):
        problem = llama_layer(LookupScheme(bits, fraction))
        result: Any = METHODS["squeezellm"].quantize_layer(problem)
        for report in result.reports:
            assert report.error <= report.rtn_error
        for name, tensor in result.weights.items():
            rounded = fit_lookup(
                problem.weights[name], problem.statistics[name], LookupScheme(bits, fraction)
            )[1]
            lost = problem.weights[name] - tensor.dequantize()
            plain = problem.weights[name] - rounded.dequantize()
            record = problem.statistics[name]
            assert bool(
                (record.row_errors(lost) <= record.row_errors(plain) * (1 + 1e-6) + 1e-12).all()
            )
        totals.append(sum(report.error for report in result.reports))
        assert totals[-1] < 0.8 * sum(report.rtn_error for report in result.reports)
    assert totals == sorted(totals, reverse=True)


def test_kept_weights_are_the_largest_and_the_most_sensitive() -> None:
    weight, inputs = heavy_weight(40, 100), correlated_inputs(256, 100)
    weight[7, 3] = 20.0
    fitted, rounded = fit_lookup(weight, statistics_of(inputs), LookupScheme(3, 36 / 4000))
    assert fitted.sparse_values is not None and rounded.sparse_values is not None
    assert fitted.sparse_rows is not None and fitted.sparse_columns is not None
    assert fitted.sparse_values.numel() == 36 == rounded.sparse_values.numel()
    row = slice(int(fitted.sparse_rows[7]), int(fitted.sparse_rows[8]))
    assert 3 in fitted.sparse_columns[row].tolist()
    counts = fitted.sparse_rows.diff().long()
    rows = torch.arange(40).repeat_interleave(counts)
    kept = fitted.dequantize()[rows, fitted.sparse_columns.long()]
    original = weight[rows, fitted.sparse_columns.long()]
    assert torch.allclose(kept, original, rtol=2e-3, atol=1e-5)
    places = set((rows * 100 + fitted.sparse_columns).tolist())
    order = weight.abs().flatten().argsort(descending=True).tolist()
    assert set(order[:32]) <= places
    sensitive = places - set(order[:32])
    assert len(sensitive) == 4
    assert sensitive != set(order[32:36])
    sensitivity = input_sensitivity(statistics_of(inputs))
    assert min(float(sensitivity[place % 100]) for place in sensitive) > 0.1


def test_outlier_weights_attract_no_centroid() -> None:
    weight, statistics = heavy_weight(40, 100), statistics_of(correlated_inputs(256, 100))
    weight[:, 3] = 20
    fitted, rounded = fit_lookup(weight, statistics, LookupScheme(3, 45 / 4000))
    assert float(fitted.table.max()) < 1
    lost, plain = (weight - one.dequantize() for one in (fitted, rounded))
    assert float(statistics.row_errors(lost).sum()) < 0.7 * float(
        statistics.row_errors(plain).sum()
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (300, 33)], ids=str)
def test_odd_shapes_and_zero_rows(shape: tuple[int, int]) -> None:
    weight = heavy_weight(*shape)
    weight[0] = 0
    statistics = statistics_of(torch.randn(20, shape[1]))
    fitted, _ = fit_lookup(weight, statistics, LookupScheme(8, 0.0045))
    assert fitted.shape == shape
    assert bool((fitted.table.diff(dim=1) >= 0).all())
    assert float(fitted.dequantize()[0].abs().max()) == 0
    assert float((fitted.dequantize() - weight).abs().max()) < 0.01


def test_damaged_weights_are_named() -> None:
    weight = heavy_weight(4, 48)
    weight[0, 0] = torch.nan
    with pytest.raises(BadInput, match=r"layers\.0\.linear holds NaN"):
        METHODS["squeezellm"].quantize_layer(one_linear(weight, LookupScheme(4)))
