"""MLP blocks: gated (SwiGLU, GeGLU) and plain, and their activation functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import torch
from torch.nn import functional

from ...kernels.activations.quantized_activations import ActivationQuant, FusesGateQuant, Rows
from ...kernels.elementwise.dispatch import (
    CLAMPED_SWIGLU_GATE,
    GATE,
    GELU_GATE,
    RowKernelQuery,
)
from .projection import NO_ADAPTERS, AdapterRows, Projection


class Block(Protocol):
    """Interface of feed-forward blocks, MLP or mixture of experts: [tokens, hidden] to [tokens, hidden]."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step may read."""
        ...

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Quantization of its input that a preceding kernel may fuse; None: it needs unquantized input."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether it can be captured into a graph: no data-dependent control flow."""
        ...

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor: ...


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _squared_relu,
}
CLAMPED_SWIGLU = "clamped_swiglu"


def gating(
    activation: str, kernel_query: RowKernelQuery
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The activation of a gated MLP, a function of gate and up: SwiGLU, GeGLU or unfused."""
    if activation == "silu":
        return GATE.select(kernel_query).run()
    if activation == CLAMPED_SWIGLU:
        return CLAMPED_SWIGLU_GATE.select(kernel_query).run()
    if activation.startswith("gelu"):
        return GELU_GATE.select(kernel_query).run(activation != "gelu")
    function = ACTIVATIONS[activation]
    return lambda gate, up: function(gate) * up


def sparse_gating(
    activation: str, sparsity: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """As `gating`, of a gate of which about a share of `sparsity` is cut to 0 (Gemma 3n).

    What is at most the mean and so many deviations of a token's gate is cut, and that taken from the rest.
    """
    function, deviations = ACTIVATIONS[activation], NormalDist().inv_cdf(sparsity)

    def combine(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        deviation = gate.std(dim=-1, keepdim=True, correction=0)
        cut = gate.mean(dim=-1, keepdim=True) + deviation * deviations
        return function(functional.relu(gate - cut)) * up

    return combine


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(activation(gate x) * up x)`, with gate and up stacked; `combine` is from `gating`."""

    gate_up: Projection
    down: Projection
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def is_capturable(self) -> bool:
        return True

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.weight_bytes + self.down.weight_bytes

    @property
    def activation_quant(self) -> ActivationQuant | None:
        return self.gate_up.activation_quant

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        gate, up = self.gate_up(x, adapters).chunk(2, dim=-1)
        activation_quant = self.down.activation_quant
        if activation_quant is not None and isinstance(self.combine, FusesGateQuant):
            return self.down(self.combine.quantized(gate, up, activation_quant), adapters)
        return self.down(self.combine(gate, up), adapters)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """`down(activation(up x))`."""

    up: Projection
    down: Projection
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def is_capturable(self) -> bool:
        return True

    @property
    def weight_bytes(self) -> int:
        return self.up.weight_bytes + self.down.weight_bytes

    @property
    def activation_quant(self) -> ActivationQuant | None:
        return self.up.activation_quant

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        return self.down(self.activation(self.up(x, adapters)), adapters)
