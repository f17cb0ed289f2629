"""SqueezeLLM: sensitivity-weighted k-means tables per output channel, and sparse float weights.

Kim et al., ICML 2024 (arXiv:2306.07629). Sensitivity is the diagonal of the Gram matrix of the layer's
inputs, in place of the loss's gradients. Of the float weights eight in nine are the largest and one in nine
the most sensitive (the paper: 0.4 % and 0.05 %). A row that a uniform table serves better keeps that.
"""

from __future__ import annotations

import torch

from ..kinds.base.tensor import QuantizedTensor, require_finite
from ..kinds.lookup.kind import (
    LookupTensor,
    assign,
    fit_tables,
    largest_weights,
    sort_rows,
    uniform_tables,
)
from ..kinds.lookup.scheme import LookupScheme
from .base import InputStatistics, LayerProblem, LayerResult, ModuleReport, each_linear, full_name

_SENSITIVE_SHARE = 1 / 9  # 0.05 % of all 0.45 % that the paper keeps
_FLOOR = 0.01  # of the mean: never-activated channels still count a little
_PIECE = 2**18  # weights per chunk, because the prefix sums are float64


def quantize_layer(problem: LayerProblem) -> LayerResult:
    def fitted(linear: str) -> tuple[QuantizedTensor, ModuleReport]:
        weight, scheme = problem.weights[linear], problem.schemes[linear]
        assert isinstance(scheme, LookupScheme)
        module = full_name(problem.prefix, linear)
        require_finite(weight, module)
        codes, rounded = fit_lookup(weight, problem.statistics[linear], scheme, name=module)
        return codes, problem.report(linear, codes.dequantize(), rounded.dequantize())

    return LayerResult.of(each_linear(problem, fitted))


def fit_lookup(
    weight: torch.Tensor, statistics: InputStatistics, scheme: LookupScheme, *, name: str = "weight"
) -> tuple[LookupTensor, LookupTensor]:
    """A quantized weight `[out, in]`, and the baseline with uniform tables; BadInput beyond float16."""
    sensitivity = input_sensitivity(statistics)
    plain_kept = largest_weights(weight, scheme.sparse_fraction)
    uniform = uniform_tables(weight, plain_kept, scheme)
    rounded = assign(weight, uniform, plain_kept, scheme, name=name)

    kept = largest_weights(weight, scheme.sparse_fraction * (1 - _SENSITIVE_SHARE))
    table = _tables(weight, sensitivity, kept, uniform_tables(weight, kept, scheme))
    if scheme.sparse_fraction:
        first = assign(weight, table, kept, scheme, name=name).dequantize()
        costs = first.sub_(weight).square_().mul_(sensitivity).masked_fill_(kept, 0.0)
        missing = int(plain_kept.sum()) - int(kept.sum())
        kept = kept | largest_weights(costs, missing / weight.numel())
        table = _tables(weight, sensitivity, kept, table)
    fitted = assign(weight, table, kept, scheme, name=name)

    def errors(candidate: LookupTensor) -> torch.Tensor:
        return statistics.row_errors(weight - candidate.dequantize())

    worse = (errors(fitted) > errors(rounded)).unsqueeze(1)
    if not bool(worse.any()):
        return fitted, rounded
    table = torch.where(worse, uniform, table)
    return assign(weight, table, torch.where(worse, plain_kept, kept), scheme, name=name), rounded


def input_sensitivity(statistics: InputStatistics) -> torch.Tensor:
    """Sensitivity (weight in the k-means) per input channel, float32 `[in]`, positive, mean 1."""
    diagonal = statistics.gram.diagonal()
    mean = diagonal.mean()
    if not bool(mean > 0):
        return torch.ones_like(diagonal)
    return (diagonal / mean + _FLOOR) / (1 + _FLOOR)


def _tables(
    weight: torch.Tensor, sensitivity: torch.Tensor, kept: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """Tables `[out, 2**bits]` of all rows, fitted to the weights that are not `kept`."""
    table = torch.empty_like(start)
    num_rows = max(1, _PIECE // weight.shape[1])
    for begin in range(0, weight.shape[0], num_rows):
        rows = slice(begin, begin + num_rows)
        importance = sensitivity.expand_as(weight[rows]).masked_fill(kept[rows], 0.0)
        table[rows] = fit_tables(sort_rows(weight[rows], importance), start[rows])
    return table
