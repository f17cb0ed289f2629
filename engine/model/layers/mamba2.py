"""Mamba 2: a selective state space after a short convolution (Granite 4, Nemotron-H)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from ...kernels.activations.quantized_activations import ActivationQuant, Rows
from ...kernels.elementwise.gated_norm import gate_then_norm
from ...kernels.recurrent.causal_conv import causal_conv, causal_conv_step
from ...kernels.recurrent.ssd_scan import ssd_scan, ssd_step
from ..spec.mixers import Mamba2Spec
from .attention import LayerCache, Step
from .projection import Projection
from .state import StateLayout


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Inputs, B and C through one convolution; the scan with its skip; a gate and a norm of each group.

    Attributes:
        input: hidden → gate, inputs with B and C, step lengths of a token.
        conv: [channels, kernel], of inputs, B and C; `conv_bias` is [channels] or None.
        rate, step_bias, skip: float32 [heads]; the decay is `exp(rate * softplus(x + step_bias))`.
        norm: [groups, width / groups].
        state: index of its first state: the window of the convolution, then the scan's state.

    Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7.
    """

    spec: Mamba2Spec
    input: Projection
    output: Projection
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    rate: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor
    eps: float
    state: int

    @property
    def weight_bytes(self) -> int:
        parts = (self.conv, self.conv_bias, self.rate, self.step_bias, self.skip, self.norm)
        total = self.input.weight_bytes + self.output.weight_bytes
        return total + sum(part.nbytes for part in parts if part is not None)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Quantization of its input that a preceding kernel may fuse."""
        return self.input.activation_quant

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        spec = self.spec
        return (
            StateLayout(tuple(self.conv.shape), self.conv.dtype),
            StateLayout((spec.num_heads, spec.head_dim, spec.state_size), torch.float32),
        )

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        spec, adapters = self.spec, step.inputs.adapters
        sizes = [spec.width, spec.conv_width, spec.num_heads]
        gate, mixed, length = self.input(x, adapters).split(sizes, dim=-1)
        conv = {"weight": self.conv, "bias": self.conv_bias}
        mixed = step.states.advance(
            self.state, (mixed,), partial(causal_conv, **conv), partial(causal_conv_step, **conv)
        )
        shared = spec.num_groups * spec.state_size
        mixed = functional.silu(mixed).float()
        inputs, into, out_of = mixed.split([spec.width, shared, shared], dim=-1)
        inputs = inputs.unflatten(-1, (spec.num_heads, spec.head_dim))
        into, out_of = (
            part.unflatten(-1, (spec.num_groups, spec.state_size)) for part in (into, out_of)
        )
        length = functional.softplus(length.float() + self.step_bias).clamp(*spec.step_limit)
        scanned = step.states.advance(
            self.state + 1,
            (inputs, length, into, out_of),
            partial(ssd_scan, rate=self.rate),
            partial(ssd_step, rate=self.rate),
        )
        scanned = (scanned + inputs * self.skip[:, None]).flatten(1)
        return self.output(gate_then_norm(scanned, gate, self.norm, self.eps), adapters)
