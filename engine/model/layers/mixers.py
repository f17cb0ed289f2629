"""Recurrent mixers: Mamba 2, the gated delta net, and LFM2's gated short convolution."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional

from ....quant.families.spec_parts import DeltaNetSpec, Mamba2Spec
from ...kernels.elementwise.dispatch import DELTA_RULE, RECURRENT_STEP, RowKernelQuery
from ...kernels.elementwise.recurrence import (
    ConvCall,
    DeltaCall,
    DeltaPlaces,
    DeltaWeights,
    MambaWeights,
    Recurrence,
    RecurrentKernel,
    StateSpaceCall,
    causal_conv,
    causal_conv_step,
    delta_inputs,
    delta_rule_step,
    gate_then_norm,
    norm_then_gate,
    ssd_scan,
    ssd_step,
    state_space_inputs,
)
from ...kernels.elementwise.reference import ActivationQuant, Rows
from .attention import LayerCache, Step
from .projection import Projection, Weights
from .state import StateLayout


class _Mixer(Weights):
    """A mixer behind an input projection, whose first state is the window of a convolution `conv` [channels,
    kernel]."""

    __slots__ = ()

    input: Projection
    conv: torch.Tensor
    state: int

    def __post_init__(self) -> None:
        query = RowKernelQuery(self.conv.device.type, self.conv.dtype, len(self.conv))
        object.__setattr__(self, "_kernel", RECURRENT_STEP.select(query).run())

    @property
    def window(self) -> StateLayout:
        return StateLayout(tuple(self.conv.shape), self.conv.dtype)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        return self.input.activation_quant

    def _convolved(
        self, x: torch.Tensor, step: Step, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [tokens, channels] through the causal convolution."""
        conv = {"weight": self.conv, "bias": bias}
        runs = partial(causal_conv, **conv), partial(causal_conv_step, **conv)
        return step.states.advance(self.state, (x,), *runs)


@dataclass(frozen=True, slots=True)
class Mamba2(_Mixer):
    """Inputs, B and C through one convolution; the scan with its skip; a gate and a norm of each group.

    Attributes:
        input: hidden → gate, inputs with B and C, step lengths of a token.
        conv: [channels, kernel], of inputs, B and C; `conv_bias` is [channels] or None.
        weights: rate, step_bias and skip are float32 [heads], the decay is `exp(rate * softplus(x +
            step_bias))`; norm is [groups, width / groups].
        state: index of its first state: the window of the convolution, then the scan's state.

    Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7.
    """

    spec: Mamba2Spec
    input: Projection
    output: Projection
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    weights: MambaWeights
    state: int
    _kernel: RecurrentKernel = field(init=False, repr=False, compare=False)

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        spec = self.spec
        shape = spec.num_heads, spec.head_dim, spec.state_size
        return self.window, StateLayout(shape, torch.float32)

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        spec, weights, adapters = self.spec, self.weights, step.inputs.adapters
        sizes = [spec.width, spec.conv_width, spec.num_heads]
        gate, mixed, length = self.input(x, adapters).split(sizes, dim=-1)
        rows = step.states.decoded
        if rows is not None:
            window, state = step.states.tensors[self.state : self.state + 2]
            conv = mixed, window, rows, self.conv, self.conv_bias
            mixed = self._kernel.conv(ConvCall(*conv, activated=True))
            call = StateSpaceCall(mixed, (gate, length), state, rows, weights, spec)
            return self.output(self._kernel.state_space(call), adapters)
        mixed = functional.silu(self._convolved(mixed, step, self.conv_bias))
        inputs, *others = state_space_inputs(mixed, length, weights, spec)
        runs = partial(ssd_scan, rate=weights.rate), partial(ssd_step, rate=weights.rate)
        scanned = step.states.advance(self.state + 1, (inputs, *others), *runs)
        scanned = (scanned + inputs * weights.skip[:, None]).flatten(1)
        return self.output(gate_then_norm(scanned, gate, weights.norm, weights.eps), adapters)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(_Mixer):
    """Queries, keys and values through one convolution; the rule; a norm, and a gate on what leaves it.

    Attributes:
        input: hidden → queries, keys, values, gate, rate and decay of a token.
        conv: [channels, kernel], of queries, keys and values.
        weights: log_rate and step_bias are float32 [value heads], the decay is `-exp(log_rate) * softplus(x +
            step_bias)`.
        state: index of its first state: the window of the convolution, then the rule's state.
    """

    spec: DeltaNetSpec
    input: Projection
    output: Projection
    conv: torch.Tensor
    weights: DeltaWeights
    state: int
    _kernel: RecurrentKernel = field(init=False, repr=False, compare=False)
    _rule: Recurrence = field(init=False, repr=False, compare=False)
    _places: DeltaPlaces = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _Mixer.__post_init__(self)
        spec, device = self.spec, self.conv.device
        query = RowKernelQuery(device.type, self.conv.dtype, spec.key_dim)
        object.__setattr__(self, "_rule", DELTA_RULE.select(query).run)
        width = 2 * (spec.keys_width + spec.values_width + spec.num_value_heads)
        columns = torch.arange(width, dtype=torch.int32)[None]
        places = (part[0].to(device) for part in self._split(columns))
        object.__setattr__(self, "_places", DeltaPlaces(*places))

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        spec = self.spec
        shape = spec.num_value_heads, spec.key_dim, spec.value_dim
        return self.window, StateLayout(shape, torch.float32)

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        spec, weights, adapters = self.spec, self.weights, step.inputs.adapters
        projected = self.input(x, adapters)
        rows = step.states.decoded
        if rows is not None:
            window, state = step.states.tensors[self.state : self.state + 2]
            places, conv = self._places, (projected, window, rows, self.conv, None)
            qkv = self._kernel.conv(ConvCall(*conv, places=places.mixed, activated=True))
            call = DeltaCall(qkv, projected, places, state, rows, weights, spec)
            return self.output(self._kernel.delta(call), adapters)
        qkv, gate, rate, decay = self._split(projected)
        qkv = functional.silu(self._convolved(qkv, step))
        inputs = delta_inputs(qkv, rate, decay, weights, spec)
        mixed = step.states.advance(self.state + 1, inputs, self._rule, delta_rule_step)
        gate = gate.unflatten(-1, (spec.num_value_heads, spec.value_dim))
        mixed = norm_then_gate(mixed, gate, weights.norm, weights.eps)
        return self.output(mixed.flatten(1), adapters)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries with keys and values, the gate, rates and decays, [tokens, width] each."""
        spec, heads = self.spec, self.spec.num_value_heads
        if not spec.by_head:
            mixed = 2 * spec.keys_width + spec.values_width
            return projected.split([mixed, spec.values_width, heads, heads], dim=-1)
        # By key head: query, key, values and gates; then rates and decays.
        shared = heads // spec.num_key_heads
        wide = shared * spec.value_dim
        sizes = [2 * (spec.keys_width + spec.values_width), 2 * heads]
        first, second = projected.split(sizes, dim=-1)
        first = first.unflatten(-1, (spec.num_key_heads, -1))
        second = second.unflatten(-1, (spec.num_key_heads, -1))
        *qkv, gate = first.split([spec.key_dim, spec.key_dim, wide, wide], dim=-1)
        rate, decay = second.split([shared, shared], dim=-1)
        qkv = torch.cat([part.flatten(1) for part in qkv], dim=-1)
        return qkv, gate.flatten(1), rate.flatten(1), decay.flatten(1)


@dataclass(frozen=True, slots=True)
class ShortConvolution(_Mixer):
    """`output(c * conv(b * x))`, with b, c and x the thirds of one projection.

    Attributes:
        conv: [hidden, kernel]; `conv_bias` is [hidden] or None.
        state: index of its state, the window of the convolution.

    Source: Liquid AI, "LFM2 Technical Report" (arXiv:2511.23404).
    """

    input: Projection
    output: Projection
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    state: int
    _kernel: RecurrentKernel = field(init=False, repr=False, compare=False)

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        return (self.window,)

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        projected, rows = self.input(x, adapters), step.states.decoded
        if rows is not None:
            conv = projected, step.states.tensors[self.state], rows, self.conv, self.conv_bias
            return self.output(self._kernel.conv(ConvCall(*conv, gated=True)), adapters)
        before, after, x = projected.chunk(3, dim=-1)
        mixed = self._convolved(before * x, step, self.conv_bias)
        return self.output(after * mixed, adapters)
