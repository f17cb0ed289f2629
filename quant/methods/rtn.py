"""The method `rtn`: round-to-nearest, the baseline of all other methods."""

from __future__ import annotations

from ..base.scheme import Scheme
from ..kinds.integer.scheme import IntScheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import round_layer


class RoundToNearest:
    """Data-free: every weight goes to the closest point of its scheme's grid."""

    name = "rtn"
    num_samples = 128
    default_format = "compressed-tensors"
    needs_statistics = False
    grouped = True
    sequential = False
    blockwise = False

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "group_size", "symmetric")
        symmetric = True if options.symmetric is None else options.symmetric
        return IntScheme(choose_bits(self.name, options.bits), options.group_size or 128, symmetric)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return round_layer(problem)
