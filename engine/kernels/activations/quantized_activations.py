"""Rows of activations in 8 bits, on their way from a norm or a gate to the linear that asked for them so.

A linear whose kernel rounds its input says how (`TakesQuantizedInput`). What makes that input may then round it as
it writes it (`RoundsRows`), which saves a pass over the rows; if it does not, the linear rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ....quant.base.scheme import Activations


@dataclass(frozen=True, slots=True)
class ActivationQuant:
    """How a linear rounds its input.

    Attributes:
        input_scale: float32 [1], where calibration fixed it.
        int8_levels: codes of int8 that the largest magnitude takes; compressed-tensors says 127.5.
    """

    activations: Activations
    input_scale: torch.Tensor | None = None
    int8_levels: float = 127.5


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Rows that were rounded: `codes * scales`.

    Attributes:
        codes: int8 or float8_e4m3fn `[rows, size]`.
        scales: float32 `[rows, 1]`, or one for each 128 elements.
    """

    codes: torch.Tensor
    scales: torch.Tensor


Rows = torch.Tensor | QuantizedActivations
"""What a projection takes, [rows, size]."""


@runtime_checkable
class TakesQuantizedInput(Protocol):
    """A linear kernel that rounds its input, and takes rows that were."""

    activation_quant: ActivationQuant

    def __call__(self, x: Rows) -> torch.Tensor: ...


@runtime_checkable
class FusesNormQuant(Protocol):
    """A kernel of a norm that can round what it writes: the sum of `x` and `added`, and its norm."""

    def quantized(
        self, x: torch.Tensor, added: torch.Tensor | None, activation_quant: ActivationQuant
    ) -> tuple[torch.Tensor, QuantizedActivations]: ...


@runtime_checkable
class FusesGateQuant(Protocol):
    """A kernel of a gate that can round what it writes."""

    def quantized(
        self, gate: torch.Tensor, up: torch.Tensor, activation_quant: ActivationQuant
    ) -> QuantizedActivations: ...
