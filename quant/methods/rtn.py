"""The method `rtn`: round to nearest; what every other method is measured against."""

from __future__ import annotations

from ..scheme import IntScheme, Scheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .rounding import round_weight


class RoundToNearest:
    """Every weight goes to the closest point of its scheme's grid, without a look at any data."""

    name = "rtn"
    default_format = "compressed-tensors"
    needs_statistics = False
    grouped = True

    def scheme(self, options: SchemeOptions) -> Scheme:
        symmetric = True if options.symmetric is None else options.symmetric
        return IntScheme(options.bits or 4, options.group_size or 128, symmetric)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        weights = {
            linear: round_weight(problem, linear, w) for linear, w in problem.weights.items()
        }
        reports = []
        for linear, codes in weights.items():
            effective = codes.dequantize()
            reports.append(problem.report(linear, effective, effective))
        return LayerResult(weights=dict(weights), norms={}, reports=reports)
