"""The method `fp8`: rounding to 8-bit floats (e4m3), for 16-bit or 8-bit inputs.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433); blocks of 128 × 128 as in
DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from ..base.errors import BadInput
from ..base.scheme import Activations, FloatScheme, Scheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import round_layer

_CHOICES = ("dynamic", "static", "none")


class Fp8:
    """e4m3 weights with a scale per output channel, per tensor, or per block.

    Inputs are rounded too unless asked otherwise: each token by its own scale, under block scales each
    run of 128 channels of a token, or all by one scale that calibration fixed.
    """

    name = "fp8"
    default_format = "fp8"  # for blocks; the other granularities do not fit there
    needs_statistics = False
    grouped = False
    sequential = False

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "granularity", "activations")
        choose_bits(self.name, options.bits, (8,), 8)
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
