"""SqueezeLLM: a table of values for each output channel, and a few weights kept as floats.

Kim et al., "SqueezeLLM: Dense-and-Sparse Quantization", ICML 2024 (arXiv:2306.07629).

The table is a k-means of the channel's weights in which a weight counts by its sensitivity. The paper
takes the diagonal of the Fisher information from gradients of the loss. Here nothing is differentiated:
the stand-in is the diagonal of the Gram matrix of the layer's inputs, the second moment of the input
channel that the weight multiplies. It is the exact curvature of the layer's own output error where input
channels are uncorrelated, and knows nothing of what later layers do with that output.

Of the weights that stay floats (0.45 % unless asked otherwise), eight in nine are the largest ones and
one in nine the most sensitive ones, as the paper divides 0.4 % and 0.05 %. Sensitive is what costs most
when rounded to the first table: sensitivity times squared rounding error.

A row of which the output error comes out above that of equal steps keeps the equal steps.
"""

from __future__ import annotations

import torch

from ..base.scheme import LookupScheme, Scheme
from ..grids.lookup_grid import assign, largest_weights, uniform_tables
from ..grids.lookup_kmeans import fit_tables, sort_rows
from ..tensors.base import QuantizedTensor
from ..tensors.lookup import LookupTensor
from .base import InputStatistics, LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import module_name, require_finite

DEFAULT_SPARSE_FRACTION = 0.0045
_SENSITIVE_SHARE = 1 / 9
_FLOOR = 0.01  # of the mean: channels that calibration never saw still count a little
_PIECE = 2**18  # weights at a time, because the running sums are float64


class SqueezeLlm:
    """The method `squeezellm`."""

    name = "squeezellm"
    default_format = "squeezellm"
    needs_statistics = True
    grouped = False
    sequential = False

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "sparse_fraction")
        bits = choose_bits(self.name, options.bits, (2, 3, 4, 8), 4)
        fraction = options.sparse_fraction
        return LookupScheme(bits, DEFAULT_SPARSE_FRACTION if fraction is None else fraction)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        weights: dict[str, QuantizedTensor] = {}
        reports = []
        for linear, weight in problem.weights.items():
            scheme = problem.schemes[linear]
            assert isinstance(scheme, LookupScheme)
            module = module_name(problem, linear)
            require_finite(weight, module)
            statistics = problem.statistics[linear]
            codes, rounded = fit_lookup(weight, statistics, scheme, name=module)
            weights[linear] = codes
            reports.append(problem.report(linear, codes.dequantize(), rounded.dequantize()))
        return LayerResult(weights=weights, norms={}, reports=reports)


def fit_lookup(
    weight: torch.Tensor, statistics: InputStatistics, scheme: LookupScheme, *, name: str = "weight"
) -> tuple[LookupTensor, LookupTensor]:
    """Quantize a weight `[out, in]`.

    Returns:
        The result, and what plain rounding to equal steps would have been.

    Raises:
        BadInput: the weight does not fit into float16.
    """
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
    """How much a weight on each input channel counts, float32 `[in]`, positive, 1 on average."""
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
