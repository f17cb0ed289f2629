"""The method `rtn`: round-to-nearest, the baseline of all other methods."""

from __future__ import annotations

from ..base.scheme import Scheme
from ..kinds.integer.scheme import IntScheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import round_layer


class RoundToNearest:
    """Data-free: every weight goes to the closest point of its scheme's grid.

    Args:
        rounds_to: the scheme where a format holds no integers (`WeightFormat.rounds_to`); None: integers.
    """

    name = "rtn"
    num_samples = 128
    default_format = "compressed-tensors"
    needs_statistics = False
    sequential = False
    blockwise = False

    def __init__(self, rounds_to: Scheme | None = None):
        self._rounds_to = rounds_to
        self.grouped: bool = rounds_to is None

    def scheme(self, options: SchemeOptions) -> Scheme:
        if self._rounds_to is not None:
            refuse_options(self.name, options)
            return self._rounds_to
        refuse_options(self.name, options, "bits", "group_size", "symmetric")
        symmetric = True if options.symmetric is None else options.symmetric
        return IntScheme(choose_bits(self.name, options.bits), options.group_size or 128, symmetric)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return round_layer(problem)
