"""The scheme that each method makes of the options, whose bits are decided; no tensor is needed for it.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023 (arXiv:2305.14314) for nf4;
"LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022 (arXiv:2208.07339), whose
outlier channels are computed in 16 bits; Micikevicius et al., "FP8 Formats for Deep Learning", 2022
(arXiv:2209.05433), in blocks of 128 × 128 as in DeepSeek-V3 (arXiv:2412.19437); Rouhani et al.,
"Microscaling Data Formats for Deep Learning", 2023 (arXiv:2310.10537); NVIDIA, "Pretraining Large Language
Models with NVFP4", 2025 (arXiv:2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, Activations, Scheme
from ..kinds.codebook.scheme import CODEBOOK_BLOCKS, CodebookScheme
from ..kinds.e8p.scheme import E8pScheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.integer.scheme import IntScheme
from ..kinds.lookup.scheme import LookupScheme
from ..kinds.trellis.scheme import TrellisScheme
from ..kinds.vectorwise.scheme import VectorwiseScheme
from .options import SchemeOptions

DEFAULT_SPARSE_FRACTION = 0.0045  # of SqueezeLLM's paper
_ACTIVATIONS = ("dynamic", "static", "none")
# Inputs of each kind; NVFP4's have a calibrated global scale, MXFP4's are dynamic throughout.
_FP4_INPUTS = {
    "nvfp4": ("static", Activations("nvfp4", "group16", dynamic=False)),
    "mxfp4": ("dynamic", Activations("mxfp4", "group32")),
}


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers in groups, symmetric and of that size where the options do not say."""

    symmetric: bool = True
    group_size: int = 128

    def __call__(self, options: SchemeOptions) -> Scheme:
        symmetric = self.symmetric if options.symmetric is None else options.symmetric
        group_size = options.group_size or self.group_size
        return IntScheme(
            options.width,
            group_size,
            symmetric,
            permuted=options.act_order == "dynamic" and group_size != PER_CHANNEL,
        )


def int8(options: SchemeOptions) -> Scheme:
    """int8 weights with one scale per output channel; with a threshold, LLM.int8()."""
    threshold = options.outlier_threshold
    if threshold is None:
        return IntScheme(options.width, options.group_size or PER_CHANNEL, True)
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


def smoothquant(options: SchemeOptions) -> Scheme:
    """W8A8: a scale for each output channel, and for each token's inputs."""
    if options.group_size not in (None, PER_CHANNEL):
        raise BadInput(
            f"--group-size {options.group_size}: method smoothquant has one scale per output "
            "channel, -1"
        )
    if options.activations not in (None, "dynamic"):
        raise BadInput(
            f"--activations {options.activations}: method smoothquant gives each token its own "
            "scale, dynamic"
        )
    return IntScheme(options.width, PER_CHANNEL, True, Activations("int8"))


def fp8(options: SchemeOptions) -> Scheme:
    """e4m3 weights with a scale per output channel, per tensor, or per block.

    Activations are quantized too by default: per token, with block scales per group of 128 channels of a
    token, or per tensor with a static calibrated scale.
    """
    granularity = options.granularity or "channel"
    if granularity not in ("tensor", "channel", "block"):
        raise BadInput(f"--granularity {granularity}: choose tensor, channel or block")
    choice = options.activations or "dynamic"
    if choice not in _ACTIVATIONS:
        raise BadInput(f"--activations {choice}: choose {', '.join(_ACTIVATIONS)}")
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


@dataclass(frozen=True, slots=True)
class Codebook:
    """Blocks of 64 weights, each weight the nearest of 16 values times the block's absmax (bitsandbytes)."""

    kind: Literal["nf4", "fp4"]

    def __call__(self, options: SchemeOptions) -> Scheme:
        size = 64 if options.group_size is None else options.group_size
        if size not in CODEBOOK_BLOCKS:
            sizes = ", ".join(str(block) for block in CODEBOOK_BLOCKS)
            raise BadInput(f"--group-size {size}: blocks of method {self.kind} have {sizes}")
        return CodebookScheme(self.kind, size, options.double_quant)


@dataclass(frozen=True, slots=True)
class BlockFloat:
    """e2m1 weights in blocks of 16 (`nvfp4`) or 32 (`mxfp4`); W4A16, or W4A4 with `--activations`."""

    kind: Literal["nvfp4", "mxfp4"]

    def __call__(self, options: SchemeOptions) -> Scheme:
        choice, activations = _FP4_INPUTS[self.kind]
        if options.activations not in (None, "none", choice):
            raise BadInput(
                f"--activations {options.activations}: method {self.kind} has {choice} and none"
            )
        scheme = Fp4Scheme(self.kind, activations if options.activations == choice else None)
        if options.group_size not in (None, scheme.block_size):
            raise BadInput(
                f"--group-size {options.group_size}: blocks of method {self.kind} have {scheme.block_size}"
            )
        return scheme


def squeezellm(options: SchemeOptions) -> Scheme:
    """Tables per output channel, and sparse float weights."""
    fraction = options.sparse_fraction
    return LookupScheme(options.width, DEFAULT_SPARSE_FRACTION if fraction is None else fraction)


def trellis(options: SchemeOptions) -> Scheme:
    """Trellis codes between transforms."""
    return TrellisScheme(options.width)


def quip(options: SchemeOptions) -> Scheme:
    """Codes of the E8 lattice between transforms."""
    return E8pScheme(options.width)
