"""Recurrences over a sequence's state, in torch: causal convolution, gated delta rule, state space scan.

A step computes one token of many sequences. A run of tokens of one sequence is computed in chunks, which
alone follow one another. All is float32.

The causal depthwise convolution has the window of the last inputs as its state, those of the newest token and
of the `kernel - 1` tokens before it; inputs before a sequence's first token are zeros:

    out[t, c] = bias[c] + sum over k of weight[c, k] * x[t - kernel + 1 + k, c]

The gated delta rule (Yang et al., "Gated Delta Networks", arXiv:2412.06464, section 3) is linear attention
that corrects what its state S [key_dim, value_dim] already predicts of a value. Each token and head has a
decay g and a rate b. In a chunk the corrections solve a triangular system (arXiv:2406.06484):

    S = exp(g) * S;    S = S + k outer (b * (v - k @ S));    out = q @ S

The state space scan of Mamba 2 (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, section 6) has a state
S [head_dim, state_size] that decays and adds each token's outer product, with a step length d; B and C are
shared by the heads of a group. A chunk is masked attention of C to B (state space duality):

    S = exp(d * rate) * S + (d * x) outer B;    out = S @ C
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from ....quant.families.spec_parts import DeltaNetSpec, Mamba2Spec

LEAST_SQUARES = 1e-6
"""Added to the squared length of queries and keys before the division."""

Recurrence = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Inputs and a state (the last argument) → outputs and the state after them."""


class StateRows(NamedTuple):
    """Sequences of a step: slots of their states, int64, and flags of those without a state yet, bool."""

    slots: torch.Tensor
    fresh: torch.Tensor


class DeltaPlaces(NamedTuple):
    """Columns, int32, of a gated delta net's projection: queries with keys and values, gate, rate, decay."""

    mixed: torch.Tensor
    gate: torch.Tensor
    rate: torch.Tensor
    decay: torch.Tensor


class DeltaWeights(NamedTuple):
    """Weights of a gated delta net without its GEMMs and convolution; see `GatedDeltaNet`."""

    log_rate: torch.Tensor
    step_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


class MambaWeights(NamedTuple):
    """Weights of Mamba 2 without its GEMMs and convolution; see `Mamba2`."""

    rate: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor
    eps: float


def causal_conv(
    x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, channels] in x's dtype for consecutive tokens of one sequence, and the window after
    them. `x` is [tokens, channels], `window` [channels, kernel] before these tokens, `weight` [channels,
    kernel]."""
    kernel = window.shape[1]
    inputs = torch.cat([window.to(x.dtype), x.T], dim=1)
    out = functional.conv1d(inputs[None, :, 1:], weight[:, None], bias, groups=len(weight))
    return out[0].T, inputs[:, -kernel:]


def causal_conv_step(
    x: torch.Tensor, windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each sequence: x [sequences, channels], windows [sequences, channels, kernel]."""
    windows = torch.cat([windows[:, :, 1:].to(x.dtype), x[:, :, None]], dim=2)
    out = (windows.float() * weight.float()).sum(dim=-1)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype), windows


CHUNK = 64
"""Most tokens of a chunk."""


def in_chunks(x: torch.Tensor) -> torch.Tensor:
    """Chunks [chunks, heads, size, dim] of [tokens, heads, dim]; zeros fill the last one."""
    size = min(CHUNK, len(x))
    missing = -len(x) % size
    padded = functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return padded.unflatten(0, (-1, size)).transpose(1, 2)


def of_chunks(chunks: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """First tokens [num_tokens, heads, dim] of chunks [heads, size, dim]."""
    return torch.stack(chunks).transpose(1, 2).flatten(0, 1)[:num_tokens]


def decay_between(decay: torch.Tensor) -> torch.Tensor:
    """exp(decay[i] - decay[j]) for j <= i, else 0: [..., size, size] of summed log decays [..., size]."""
    size = decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    between = decay[..., :, None] - decay[..., None, :]
    return between.masked_fill(later, float("-inf")).exp()


DeltaInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Arguments of the gated delta rule: query, key, value, log decay, rate."""


def delta_inputs(
    mixed: torch.Tensor,
    rate: torch.Tensor,
    decay: torch.Tensor,
    weights: DeltaWeights,
    spec: DeltaNetSpec,
) -> DeltaInputs:
    """Arguments of the rule, from `mixed` [tokens, channels] after the convolution, rates and decays."""
    sizes = [spec.keys_width, spec.keys_width, spec.values_width]
    query, key, value = mixed.float().split(sizes, dim=-1)
    shared = spec.num_value_heads // spec.num_key_heads

    def unit(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (spec.num_key_heads, spec.key_dim))
        heads = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + LEAST_SQUARES)
        return heads.repeat_interleave(shared, dim=1)

    return (
        unit(query) * spec.key_dim**-0.5,
        unit(key),
        value.unflatten(-1, (spec.num_value_heads, spec.value_dim)),
        -weights.log_rate.exp() * functional.softplus(decay.float() + weights.step_bias),
        rate.float().sigmoid(),
    )


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, heads, value_dim] for consecutive tokens of one sequence, and the state after them.
    Query and key are [tokens, heads, key_dim], `log_decay` (at most 0) and `rate` [tokens, heads], `state`
    [heads, key_dim, value_dim]."""
    num_tokens = len(query)
    rows = [in_chunks(x) for x in (query, key, value, log_decay[..., None], rate[..., None])]
    query, key, value, log_decay, rate = rows  # [chunks, heads, size, …]
    decay = log_decay.squeeze(-1).cumsum(dim=-1)
    between = decay_between(decay)
    corrected = key * rate
    system = corrected @ key.transpose(-1, -2) * between
    sides = torch.cat([value * rate, corrected * decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    inside = query @ key.transpose(-1, -2) * between
    read = query * decay.exp()[..., None]
    written = (key * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
    kept = decay[..., -1:, None].exp()
    outputs = []
    for chunk in range(len(query)):
        new = values[chunk] - keys[chunk] @ state
        outputs.append(read[chunk] @ state + inside[chunk] @ new)
        state = state * kept[chunk] + written[chunk] @ new
    return of_chunks(outputs, num_tokens), state


def delta_rule_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` for the next token of each sequence: sequences in place of tokens, and a state of each."""
    states = states * log_decay.exp()[..., None, None]
    predicted = (key[..., None] * states).sum(dim=-2)
    correction = (value - predicted) * rate[..., None]
    states = states + key[..., None] * correction[..., None, :]
    return (query[..., None] * states).sum(dim=-2), states


def state_space_inputs(
    mixed: torch.Tensor, length: torch.Tensor, weights: MambaWeights, spec: Mamba2Spec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs by head, step lengths, B and C, from `mixed` [tokens, channels] after the convolution."""
    shared = spec.num_groups * spec.state_size
    inputs, into, out_of = mixed.float().split([spec.width, shared, shared], dim=-1)
    into, out_of = (
        part.unflatten(-1, (spec.num_groups, spec.state_size)) for part in (into, out_of)
    )
    length = functional.softplus(length.float() + weights.step_bias).clamp(*spec.step_limit)
    return inputs.unflatten(-1, (spec.num_heads, spec.head_dim)), length, into, out_of


def ssd_scan(
    x: torch.Tensor,
    length: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    state: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, heads, head_dim] for consecutive tokens of one sequence, and the state after them. `x`
    [tokens, heads, head_dim], `length` [tokens, heads]; `into`, `out_of`, B and C, are [tokens, groups,
    state_size], `state` is [heads, head_dim, state_size], `rate` [heads] below 0."""
    num_tokens, shared = len(x), x.shape[1] // into.shape[1]
    x = in_chunks(x * length[..., None])  # [chunks, heads, size, …], as are all below
    decay = in_chunks((length * rate)[..., None]).squeeze(-1).cumsum(dim=-1)
    into, out_of = in_chunks(into), in_chunks(out_of)
    scores = (out_of @ into.transpose(-1, -2)).repeat_interleave(shared, dim=1)
    inside = scores * decay_between(decay) @ x
    into = into.repeat_interleave(shared, dim=1) * (decay[..., -1:] - decay).exp()[..., None]
    added = x.transpose(-1, -2) @ into
    out_of = out_of.repeat_interleave(shared, dim=1) * decay.exp()[..., None]
    kept = decay[..., -1:, None].exp()
    outputs = []
    for chunk in range(len(x)):
        outputs.append(inside[chunk] + out_of[chunk] @ state.transpose(-1, -2))
        state = state * kept[chunk] + added[chunk]
    return of_chunks(outputs, num_tokens), state


def ssd_step(
    x: torch.Tensor,
    length: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    states: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ssd_scan` for the next token of each sequence: sequences in place of tokens, and a state of each."""
    shared = x.shape[1] // into.shape[1]
    into, out_of = (part.repeat_interleave(shared, dim=1) for part in (into, out_of))
    kept = (length * rate).exp()[..., None, None]
    states = states * kept + (x * length[..., None])[..., None] * into[..., None, :]
    return (states * out_of[..., None, :]).sum(dim=-1), states


def norm_then_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm(x) * silu(gate)` of each head, in the gate's dtype: [tokens, heads, size], weight [size]."""
    normed = functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * functional.silu(gate.float())).to(gate.dtype)


def gate_then_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm(x * silu(gate))` of each group, in the gate's dtype: [tokens, width]."""
    gated = (x.float() * functional.silu(gate.float())).unflatten(-1, weight.shape)
    normed = functional.rms_norm(gated, weight.shape[-1:], None, eps) * weight.float()
    return normed.flatten(-2).to(gate.dtype)


def stepped(
    states: torch.Tensor,
    rows: StateRows,
    inputs: Sequence[torch.Tensor],
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Outputs of `step` for a token of each sequence; writes their states to `states` [slots, ...]."""
    before = states.index_select(0, rows.slots)
    fresh = rows.fresh.view(-1, *[1] * (before.dim() - 1))
    out, after = step(*inputs, before.masked_fill(fresh, 0))
    states.index_copy_(0, rows.slots, after.to(states.dtype))
    return out


class ConvCall(NamedTuple):
    """Arguments of a causal convolution of columns of `x`, [rows, channels], with states [slots, channels,
    kernel].

    `places`, int32 [channels], are the columns; None: all of them, in order. `activated`: SiLU of the result.
    `gated`: x has three parts of [rows, channels], and the result is `second * conv(first * third)`.
    """

    x: torch.Tensor
    states: torch.Tensor
    rows: StateRows
    weight: torch.Tensor
    bias: torch.Tensor | None
    places: torch.Tensor | None = None
    activated: bool = False
    gated: bool = False


class DeltaCall(NamedTuple):
    """Arguments of the gated delta rule with its norm and gate. `mixed` are queries, keys and values after
    convolution and activation, `projected` has the columns of gate, rate and decay, `states` are float32
    [slots, heads, key_dim, value_dim]."""

    mixed: torch.Tensor
    projected: torch.Tensor
    places: DeltaPlaces
    states: torch.Tensor
    rows: StateRows
    weights: DeltaWeights
    spec: DeltaNetSpec


class StateSpaceCall(NamedTuple):
    """Arguments of the state space step with skip, gate and norm of each group. `mixed` are inputs, B and C
    after convolution and activation; `parts` gate [rows, width] and step lengths [rows, heads], columns of
    one projection; `states` float32 [slots, heads, head_dim, state_size]."""

    mixed: torch.Tensor
    parts: tuple[torch.Tensor, torch.Tensor]
    states: torch.Tensor
    rows: StateRows
    weights: MambaWeights
    spec: Mamba2Spec


class RecurrentKernel(Protocol):
    """Recurrent mixers between their GEMMs, for one token of several sequences; changes `states[rows]`."""

    def conv(self, call: ConvCall) -> torch.Tensor: ...

    def delta(self, call: DeltaCall) -> torch.Tensor: ...

    def state_space(self, call: StateSpaceCall) -> torch.Tensor: ...


class TorchRecurrence:
    """`RecurrentKernel` in torch: the reference."""

    def conv(self, call: ConvCall) -> torch.Tensor:
        x, states, rows, weight, bias, places, activated, gated = call
        after = None
        if gated:
            before, after, x = x.chunk(3, dim=-1)
            x = before * x
        elif places is not None:
            x = x.index_select(1, places)
        out = stepped(states, rows, (x,), partial(causal_conv_step, weight=weight, bias=bias))
        out = functional.silu(out) if activated else out
        return out if after is None else after * out

    def delta(self, call: DeltaCall) -> torch.Tensor:
        mixed, projected, places, states, rows, weights, spec = call
        gate, rate, decay = (projected.index_select(1, columns) for columns in places[1:])
        inputs = delta_inputs(mixed, rate, decay, weights, spec)
        out = stepped(states, rows, inputs, delta_rule_step)
        gate = gate.unflatten(-1, (spec.num_value_heads, spec.value_dim))
        return norm_then_gate(out, gate, weights.norm, weights.eps).flatten(1)

    def state_space(self, call: StateSpaceCall) -> torch.Tensor:
        mixed, (gate, length), states, rows, weights, spec = call
        inputs, *others = state_space_inputs(mixed, length, weights, spec)
        step = partial(ssd_step, rate=weights.rate)
        out = stepped(states, rows, (inputs, *others), step)
        out = (out + inputs * weights.skip[:, None]).flatten(1)
        return gate_then_norm(out, gate, weights.norm, weights.eps)
