"""Rounding to a fixed codebook of 16 values: `nf4`, `fp4` (bitsandbytes), `nvfp4` and `mxfp4` (e2m1).

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023 (arXiv:2305.14314); Rouhani et
al., "Microscaling Data Formats for Deep Learning", 2023 (arXiv:2310.10537); NVIDIA, "Pretraining Large
Language Models with NVFP4", 2025 (arXiv:2509.25149).
"""

from __future__ import annotations

from typing import Literal

from ..base.errors import BadInput
from ..base.scheme import Activations, Scheme
from ..kinds.codebook.scheme import CODEBOOK_BLOCKS, CodebookScheme
from ..kinds.fp4.scheme import Fp4Scheme
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
    blockwise = False

    def __init__(self, kind: Literal["nf4", "fp4"]) -> None:
        self.name: str = kind
        self._kind: Literal["nf4", "fp4"] = kind

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "group_size", "double_quant")
        choose_bits(self.name, options.bits)
        size = 64 if options.group_size is None else options.group_size
        if size not in CODEBOOK_BLOCKS:
            sizes = ", ".join(str(block) for block in CODEBOOK_BLOCKS)
            raise BadInput(f"--group-size {size}: blocks of method {self.name} have {sizes}")
        return CodebookScheme(self._kind, size, options.double_quant)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return round_layer(problem)


# Inputs of each kind; NVFP4's have a calibrated global scale, MXFP4's are dynamic throughout.
_FP4_INPUTS = {
    "nvfp4": ("static", Activations("nvfp4", "group16", dynamic=False)),
    "mxfp4": ("dynamic", Activations("mxfp4", "group32")),
}


class BlockFloat:
    """e2m1 weights in blocks of 16 (`nvfp4`) or 32 (`mxfp4`); W4A16, or W4A4 with `--activations`."""

    default_format = "compressed-tensors"
    num_samples = 128
    needs_statistics = False
    grouped = False
    sequential = False
    blockwise = False

    def __init__(self, kind: Literal["nvfp4", "mxfp4"]) -> None:
        self.name: str = kind
        self._kind: Literal["nvfp4", "mxfp4"] = kind

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "group_size", "activations")
        choose_bits(self.name, options.bits)
        choice, activations = _FP4_INPUTS[self._kind]
        if options.activations not in (None, "none", choice):
            raise BadInput(
                f"--activations {options.activations}: method {self.name} has {choice} and none"
            )
        scheme = Fp4Scheme(self._kind, activations if options.activations == choice else None)
        if options.group_size not in (None, scheme.block_size):
            raise BadInput(
                f"--group-size {options.group_size}: blocks of method {self.name} have {scheme.block_size}"
            )
        return scheme

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return round_layer(problem)
