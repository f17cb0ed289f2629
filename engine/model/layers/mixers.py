"""Recurrent mixers: Mamba 2, the gated delta net, and LFM2's gated short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from ....quant.families.spec_parts import DeltaNetSpec, Mamba2Spec
from ...kernels.elementwise.activations import ActivationQuant, Rows
from ...kernels.elementwise.recurrence import (
    causal_conv,
    causal_conv_step,
    delta_rule,
    delta_rule_step,
    gate_then_norm,
    norm_then_gate,
    ssd_scan,
    ssd_step,
)
from .attention import LayerCache, Step
from .projection import Projection, Weights
from .state import StateLayout


class _Mixer(Weights):
    """A mixer behind an input projection."""

    __slots__ = ()

    input: Projection
    state: int

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Quantization of its input that a preceding kernel may fuse."""
        return self.input.activation_quant

    def _convolved(
        self, x: torch.Tensor, step: Step, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [tokens, channels] through the causal convolution, whose window is the first state."""
        conv = {"weight": weight, "bias": bias}
        runs = partial(causal_conv, **conv), partial(causal_conv_step, **conv)
        return step.states.advance(self.state, (x,), *runs)


@dataclass(frozen=True, slots=True)
class Mamba2(_Mixer):
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
        mixed = self._convolved(mixed, step, self.conv, self.conv_bias)
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


_LEAST_SQUARES = 1e-6  # added to the squared length of queries and keys before the division


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(_Mixer):
    """Queries, keys and values through one convolution; the rule; a norm, and a gate on what leaves it.

    Attributes:
        input: hidden → queries, keys, values, gate, rate and decay of a token.
        conv: [channels, kernel], of queries, keys and values.
        log_rate, step_bias: float32 [value heads]; the decay is `-exp(log_rate) * softplus(x + step_bias)`.
        norm: [value_dim], the weight of the norm of each head.
        state: index of its first state: the window of the convolution, then the rule's state.
    """

    spec: DeltaNetSpec
    input: Projection
    output: Projection
    conv: torch.Tensor
    log_rate: torch.Tensor
    step_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    state: int

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        spec = self.spec
        return (
            StateLayout(tuple(self.conv.shape), self.conv.dtype),
            StateLayout((spec.num_value_heads, spec.key_dim, spec.value_dim), torch.float32),
        )

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        spec, adapters = self.spec, step.inputs.adapters
        projected = self.input(x, adapters)
        qkv, gate, rate, decay = (
            self._by_head(projected) if spec.by_head else self._split(projected)
        )
        qkv = self._convolved(qkv, step, self.conv)
        sizes = [spec.keys_width, spec.keys_width, spec.values_width]
        query, key, value = functional.silu(qkv).float().split(sizes, dim=-1)
        query = self._unit(query) * spec.key_dim**-0.5
        decay = -self.log_rate.exp() * functional.softplus(decay.float() + self.step_bias)
        values = value.unflatten(-1, (spec.num_value_heads, spec.value_dim))
        inputs = (query, self._unit(key), values, decay, rate.float().sigmoid())
        mixed = step.states.advance(self.state + 1, inputs, delta_rule, delta_rule_step)
        gate = gate.unflatten(-1, (spec.num_value_heads, spec.value_dim))
        return self.output(norm_then_gate(mixed, gate, self.norm, self.eps).flatten(1), adapters)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries with keys and values, the gate, rates and decays, [tokens, width] each."""
        spec = self.spec
        mixed = 2 * spec.keys_width + spec.values_width
        heads = spec.num_value_heads
        return projected.split([mixed, spec.values_width, heads, heads], dim=-1)

    def _by_head(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a projection that lies by key head: query, key, values and gates; then rates and decays."""
        spec = self.spec
        shared = spec.num_value_heads // spec.num_key_heads
        wide = shared * spec.value_dim
        sizes = [2 * (spec.keys_width + spec.values_width), 2 * spec.num_value_heads]
        first, second = projected.split(sizes, dim=-1)
        first = first.unflatten(-1, (spec.num_key_heads, -1))
        second = second.unflatten(-1, (spec.num_key_heads, -1))
        *qkv, gate = first.split([spec.key_dim, spec.key_dim, wide, wide], dim=-1)
        rate, decay = second.split([shared, shared], dim=-1)
        qkv = torch.cat([part.flatten(1) for part in qkv], dim=-1)
        return qkv, gate.flatten(1), rate.flatten(1), decay.flatten(1)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys of unit length, one for each value head: [tokens, value heads, key_dim]."""
        spec = self.spec
        heads = x.unflatten(-1, (spec.num_key_heads, spec.key_dim))
        heads = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + _LEAST_SQUARES)
        return heads.repeat_interleave(spec.num_value_heads // spec.num_key_heads, dim=1)


@dataclass(frozen=True, slots=True)
class ShortConvolution(_Mixer):
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
    def state_layouts(self) -> tuple[StateLayout, ...]:
        return (StateLayout(tuple(self.weight.shape), self.weight.dtype),)

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        before, after, x = self.input(x, adapters).chunk(3, dim=-1)
        mixed = self._convolved(before * x, step, self.weight, self.bias)
        return self.output(after * mixed, adapters)
