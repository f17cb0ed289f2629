"""Gated short convolution (LFM2): a causal convolution between two gates, in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.activations.quantized_activations import ActivationQuant, Rows
from ...kernels.recurrent.causal_conv import causal_conv, causal_conv_step
from .attention import LayerCache, Step
from .projection import Projection
from .state import StateLayout


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """`output(c * conv(b * x))`, with b, c and x the thirds of one projection.

    Attributes:
        weight: [hidden, kernel]; `bias` is [hidden] or None.
        state: index of its state, the window of the convolution.

    Source: Liquid AI, "LFM2 Technical Report" (arXiv:2511.23404).
    """

    input: Projection
    output: Projection
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: int

    @property
    def weight_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.input.weight_bytes + self.output.weight_bytes + self.weight.nbytes + bias

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Quantization of its input that a preceding kernel may fuse."""
        return self.input.activation_quant

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        return (StateLayout(tuple(self.weight.shape), self.weight.dtype),)

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters, conv = step.inputs.adapters, {"weight": self.weight, "bias": self.bias}
        before, after, x = self.input(x, adapters).chunk(3, dim=-1)
        mixed = step.states.advance(
            self.state,
            (before * x,),
            partial(causal_conv, **conv),
            partial(causal_conv_step, **conv),
        )
        return self.output(after * mixed, adapters)
