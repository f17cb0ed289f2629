"""The method `int8`: rounding to 8 bits, for 16-bit inputs or as LLM.int8() splits them.

Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022
(arXiv:2208.07339), for the split: inputs below the threshold are multiplied in int8, the channels above
it in 16 bits.
"""

from __future__ import annotations

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, IntScheme, Scheme, VectorwiseScheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import round_layer


class Int8:
    """int8 weights with one scale per output channel; a threshold makes them those of LLM.int8()."""

    name = "int8"
    default_format = "bitsandbytes"  # for the split; plain int8 does not fit there
    needs_statistics = False
    grouped = False
    sequential = False

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "group_size", "outlier_threshold")
        bits = choose_bits(self.name, options.bits, (8,), 8)
        threshold = options.outlier_threshold
        if threshold is None:
            return IntScheme(bits, options.group_size or PER_CHANNEL, True)
        if threshold <= 0:
            raise BadInput(
                f"--outlier-threshold {threshold:g}: give a positive magnitude of inputs, usually 6"
            )
        if options.group_size not in (None, PER_CHANNEL):
            raise BadInput(
                f"--group-size {options.group_size}: rows of LLM.int8() have one magnitude each; "
                "leave out --group-size or --outlier-threshold"
            )
        return VectorwiseScheme(threshold)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return round_layer(problem)
