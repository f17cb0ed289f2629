"""The methods `int8` and `fp8`: 8-bit weights, weight-only, with 8-bit activations, or LLM.int8().

Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022
(arXiv:2208.07339), for the decomposition: an int8 GEMM below the threshold, a 16-bit GEMM for the outlier
channels. Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433); blocks of 128 × 128
as in DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, Activations, Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.integer.scheme import IntScheme
from ..kinds.vectorwise.scheme import VectorwiseScheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import round_layer

_CHOICES = ("dynamic", "static", "none")


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
        bits = choose_bits(self.name, options.bits)
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


class Fp8:
    """e4m3 weights with a scale per output channel, per tensor, or per block.

    Activations are quantized too by default: per token, with block scales per group of 128 channels of a
    token, or per tensor with a static calibrated scale.
    """

    name = "fp8"
    num_samples = 128
    default_format = "fp8"  # for blocks; it does not store the other granularities
    needs_statistics = False
    grouped = False
    sequential = False
    blockwise = False

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "granularity", "activations")
        choose_bits(self.name, options.bits)
        granularity = options.granularity or "channel"
        if granularity not in ("tensor", "channel", "block"):
            raise BadInput(f"--granularity {granularity}: choose tensor, channel or block")
        choice = options.activations or "dynamic"
        if choice not in _CHOICES:
            raise BadInput(f"--activations {choice}: choose {', '.join(_CHOICES)}")
        if choice == "none":
            return FloatScheme(granularity)
        if choice == "dynamic":
            each = "group128" if granularity == "block" else "token"
            return FloatScheme(granularity, Activations("fp8", each))
        if granularity == "block":
            raise BadInput(
                "--activations static: blocks go with dynamic activations; "
                "use --granularity channel or tensor"
            )
        return FloatScheme(granularity, Activations("fp8", "tensor", dynamic=False))

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return round_layer(problem)
