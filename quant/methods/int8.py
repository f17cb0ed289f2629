"""The method `int8`: per-channel int8 weights, weight-only or LLM.int8() mixed decomposition.

Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022
(arXiv:2208.07339), for the decomposition: an int8 GEMM below the threshold, a 16-bit GEMM for the
outlier channels.
"""

from __future__ import annotations

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, IntScheme, Scheme, VectorwiseScheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import round_layer


class Int8:
    """int8 weights with one scale per output channel; with a threshold, LLM.int8()."""

    name = "int8"
    num_samples = 128
    default_format = "bitsandbytes"  # for LLM.int8(); it does not store plain int8
    needs_statistics = False
    grouped = False
    sequential = False
    blockwise = False

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
