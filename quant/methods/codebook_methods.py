"""The methods `nf4` and `fp4`: rounding to a fixed codebook of 16 values, as in bitsandbytes.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023 (arXiv:2305.14314).
"""

from __future__ import annotations

from typing import Literal

from ..base.errors import BadInput
from ..base.scheme import CODEBOOK_BLOCKS, CodebookScheme, Scheme
from .base import LayerProblem, LayerResult, SchemeOptions
from .options import choose_bits, refuse_options
from .rounding import round_layer


class Codebook:
    """Blocks of 64 weights, each weight the nearest codebook value times the block's absmax."""

    num_samples = 128
    default_format = "bitsandbytes"
    needs_statistics = False
    grouped = False
    sequential = False

    def __init__(self, kind: Literal["nf4", "fp4"]) -> None:
        self.name: str = kind
        self._kind: Literal["nf4", "fp4"] = kind

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "group_size", "double_quant")
        choose_bits(self.name, options.bits, (4,), 4)
        size = 64 if options.group_size is None else options.group_size
        if size not in CODEBOOK_BLOCKS:
            sizes = ", ".join(str(block) for block in CODEBOOK_BLOCKS)
            raise BadInput(f"--group-size {size}: blocks of method {self.name} have {sizes}")
        return CodebookScheme(self._kind, size, options.double_quant)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return round_layer(problem)
