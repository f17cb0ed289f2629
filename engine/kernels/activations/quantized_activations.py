"""Quantized activations: fusion of a norm or gate with the quantization of the next linear's input.

A linear kernel with a quantized input declares how it is quantized (`TakesQuantizedInput`). The kernel
before it may then quantize as it writes (`FusesNormQuant`, `FusesGateQuant`), which saves a pass over the
activations; if it does not, the linear quantizes its input itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ....quant.base.scheme import Activations


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
