"""Quantized activations, fake-quantized and as codes, and fusion with the norm or gate before a linear.

A linear kernel with a quantized input declares how it is quantized (`TakesQuantizedInput`). The kernel before
it may then quantize as it writes (`FusesNormQuant`, `FusesGateQuant`), which saves a pass over the
activations; if it does not, the linear quantizes its input itself.

Quantization (int8, fp8, FP4; dynamic or static) is batch-invariant: a token's result depends on that token
alone. Two schemes are therefore applied at a finer granularity than published: a dynamic per-tensor scale is
computed per token, and the outlier columns of LLM.int8() are determined per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from ....quant.base.scheme import Activations, Scheme
from ....quant.kinds.fp4.kind import block_scales, e2m1_codes, e2m1_table, fp4_factors
from ....quant.kinds.fp4.scheme import Fp4Scheme
from ....quant.kinds.fp8.kind import E4M3_MAX


@dataclass(frozen=True, slots=True)
class ActivationQuant:
    """Activation quantization of a linear's input.

    Attributes:
        input_scale: float32 [1], static scale from calibration; None: dynamic.
        int8_levels: the int8 code of the largest magnitude; 127.5 in compressed-tensors.
        block: channels that share a scale, as ggml's activations do; 0: as `activations` say.
    """

    activations: Activations
    input_scale: torch.Tensor | None = None
    int8_levels: float = 127.5
    block: int = 0


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Quantized activations: `codes * scales`.

    Attributes:
        codes: int8 or float8_e4m3fn `[rows, size]`.
        scales: float32 `[rows, 1]` per token, or `[rows, groups]` for groups of channels.
    """

    codes: torch.Tensor
    scales: torch.Tensor


Rows = torch.Tensor | QuantizedActivations
"""Input of a linear, [rows, size]."""


@runtime_checkable
class TakesQuantizedInput(Protocol):
    """A linear kernel that quantizes its input, and also takes a quantized input."""

    activation_quant: ActivationQuant

    def __call__(self, x: Rows) -> torch.Tensor: ...


@runtime_checkable
class FusesNormQuant(Protocol):
    """A norm kernel with fused output quantization: the sum of `x` and `added`, and its quantized norm."""

    def quantized(
        self, x: torch.Tensor, added: torch.Tensor | None, activation_quant: ActivationQuant
    ) -> tuple[torch.Tensor, QuantizedActivations]: ...


@runtime_checkable
class FusesGateQuant(Protocol):
    """A gated-activation kernel with fused output quantization."""

    def quantized(
        self, gate: torch.Tensor, up: torch.Tensor, activation_quant: ActivationQuant
    ) -> QuantizedActivations: ...


RUN = 128
"""Group size of the granularity `group128`, in input channels; the last group may be shorter."""


def fake_quantize_inputs(
    x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Fake-quantize (quantize–dequantize) `x [tokens, in]` as `scheme` says; the result is in `x`'s dtype.

    Args:
        input_scale: float32 `[1]`, for static activations; of NVFP4 inputs their global scale.
    """
    if (threshold := scheme.outlier_threshold) is not None:
        codes, scale, outliers = split_outliers(x, threshold)
        return (codes * scale + outliers).to(x.dtype)
    if scheme.activations is None:
        return x
    return fake_quantize_activations(x, scheme.activations, input_scale)


def fake_quantize_activations(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Fake-quantize `x` as `activations` say, with compressed-tensors' scales.

    They are `max|x| / 127.5` for int8, whose codes go from -128 to 127, and `max|x| / 448` for e4m3.
    """
    values = x.to(torch.float32)
    if activations.kind == "nvfp4" or activations.kind == "mxfp4":
        return _fake_fp4(values, Fp4Scheme(activations.kind), input_scale).to(x.dtype)
    if activations.granularity == "group128":
        values = functional.pad(values, (0, -x.shape[-1] % RUN)).unflatten(-1, (-1, RUN))
    scale = _scale(values, activations, input_scale)
    if activations.kind == "int8":
        quantized = _int8_codes(values, scale)
    else:
        scaled = (values / scale).clamp(-E4M3_MAX, E4M3_MAX)
        quantized = scaled.to(torch.float8_e4m3fn).to(torch.float32)
    return (quantized * scale).view(*x.shape[:-1], -1)[..., : x.shape[-1]].to(x.dtype)


def _fake_fp4(
    values: torch.Tensor, scheme: Fp4Scheme, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """Fake-quantize float32 `[..., in]` to NVFP4 or MXFP4, as weights are: dynamic scales of blocks."""
    blocks = values.unflatten(-1, (-1, scheme.block_size))
    scales = block_scales(blocks.abs().amax(dim=-1), scheme, input_scale)
    factors = fp4_factors(scales, input_scale).unsqueeze(-1)
    codes = e2m1_codes(blocks / factors)
    table = e2m1_table().to(values.device)
    return (table[codes.to(torch.int32)] * factors).flatten(-2)


def int8_inputs(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x [tokens, in]` to int8 for an integer GEMM, per token or with a static scale.

    Returns:
        int8 codes `[tokens, in]` and float32 scales, `[tokens, 1]` or for static activations `[1]`.
        Groups of 128 are not supported: their partial sums cannot be accumulated as integers.
    """
    values = x.to(torch.float32)
    scale = _scale(values, activations, input_scale)
    return _int8_codes(values, scale).to(torch.int8), scale


def split_outliers(
    x: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LLM.int8() decomposition: outliers (magnitude >= `threshold`) stay floats, the rest becomes int8.

    The scale is bitsandbytes', `max|x| / 127` of the quantized values. A threshold of 0 quantizes
    everything.

    Returns:
        Codes int8 `[tokens, in]`, 0 at outliers; float32 scales `[tokens, 1]`; float32 outliers
        `[tokens, in]`, 0 elsewhere.

    Source: Dettmers et al., "LLM.int8()", NeurIPS 2022 (arXiv:2208.07339).
    """
    values = x.to(torch.float32)
    small = values.abs() < threshold if threshold > 0 else torch.ones_like(values, dtype=torch.bool)
    rest = values.where(small, 0.0)
    scale = _nonzero(rest.abs().amax(dim=-1, keepdim=True) / 127)
    return torch.round(rest / scale).to(torch.int8), scale, values.where(~small, 0.0)


def _int8_codes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes in -128..127, as floats."""
    return torch.round(values / scale).clamp_(-128, 127)


def _scale(
    values: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """One dynamic scale per group along the last axis, or the static scale."""
    if not activations.dynamic:
        assert input_scale is not None
        return input_scale.to(torch.float32)
    largest = values.abs().amax(dim=-1, keepdim=True)
    return _nonzero(largest / (127.5 if activations.kind == "int8" else E4M3_MAX))


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: 1 for all-zero groups."""
    return scale.where(scale > 0, 1.0)
