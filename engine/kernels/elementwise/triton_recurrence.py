# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Recurrent steps in Triton: one token of each of several sequences, whose states are changed in their slots.

A causal convolution with what surrounds it; the gated delta rule from the convolution's output to the gated
norm of each value head; Mamba 2's state space step with its skip and gate, and the norm of its groups. All
arithmetic is float32. `recurrence.py` has the formulas; a row depends on its own sequence alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.devices import power_of_two
from .recurrence import LEAST_SQUARES, ConvCall, DeltaCall, StateSpaceCall

CHANNELS = tl.constexpr(256)
"""Channels of a convolution that one program takes."""


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Softplus as torch computes it: the argument itself above 20, where the rest is below its last bit."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _conv(
    x_ptr,
    place_ptr,
    window_ptr,
    slot_ptr,
    fresh_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_row,
    channels,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    ACTIVATED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Move the windows on by a token, and convolve. Grid: rows, blocks of channels. `place_ptr` has the
    column of each channel. ACTIVATED: SiLU of the result. GATED: the columns are three parts, the convolution
    is of the first times the last, and the second multiplies it."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    taps = tl.arange(0, TAPS)
    is_channel = channel < channels
    columns = channel
    if place_ptr is not None:
        columns = tl.load(place_ptr + channel, mask=is_channel, other=0)
    row_ptr = x_ptr + row * x_row
    if GATED:
        x = tl.load(row_ptr + 2 * channels + columns, mask=is_channel, other=0.0)
        x = (x.to(tl.float32) * tl.load(row_ptr + columns, mask=is_channel, other=0.0)).to(x.dtype)
    else:
        x = tl.load(row_ptr + columns, mask=is_channel, other=0.0)
    slot = tl.load(slot_ptr + row)
    has_state = tl.load(fresh_ptr + row) == 0
    places = channel[:, None] * KERNEL + taps[None, :]
    is_tap = is_channel[:, None] & (taps < KERNEL)[None, :]
    windows = window_ptr + slot * channels * KERNEL + places
    is_old = is_tap & (taps < KERNEL - 1)[None, :] & has_state
    old = tl.load(windows + 1, mask=is_old, other=0.0).to(tl.float32)
    moved = tl.where((taps == KERNEL - 1)[None, :], x.to(tl.float32)[:, None], old)
    tl.debug_barrier()  # the next tap of a channel may be another thread's
    tl.store(windows, moved.to(window_ptr.dtype.element_ty), mask=is_tap)
    weight = tl.load(weight_ptr + places, mask=is_tap, other=0.0).to(tl.float32)
    out = tl.sum(moved * weight, 1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    out = out.to(x.dtype).to(tl.float32)
    if ACTIVATED:
        out = _silu(out)
    if GATED:
        out *= tl.load(row_ptr + channels + columns, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * channels + channel, out.to(x.dtype), mask=is_channel)


@triton.jit
def _delta(
    mixed_ptr,
    x_ptr,
    gate_place_ptr,
    rate_place_ptr,
    decay_place_ptr,
    state_ptr,
    slot_ptr,
    fresh_ptr,
    log_rate_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    x_row,
    eps,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Gated delta rule, norm and gate of a value head. Grid: rows, value heads. `mixed_ptr`: queries, keys
    and values after the convolution; `x_ptr`: the projection that gate, rate and decay are columns of. Of a
    sequence without a state it begins with zeros."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = keys < KEY, values < VALUE
    all_keys: tl.constexpr = HEADS // SHARED * KEY
    mixed = mixed_ptr + row * (2 * all_keys + HEADS * VALUE)
    at = mixed + head // SHARED * KEY + keys
    query = tl.load(at, mask=is_key, other=0.0).to(tl.float32)
    key = tl.load(at + all_keys, mask=is_key, other=0.0).to(tl.float32)
    at = mixed + 2 * all_keys + head * VALUE + values
    value = tl.load(at, mask=is_value, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + LEAST_SUM) * SCALE
    key *= tl.rsqrt(tl.sum(key * key, 0) + LEAST_SUM)
    row_ptr = x_ptr + row * x_row
    rate = tl.load(row_ptr + tl.load(rate_place_ptr + head)).to(tl.float32)
    rate = 1.0 / (1.0 + tl.exp(-rate))
    decay = tl.load(row_ptr + tl.load(decay_place_ptr + head)).to(tl.float32)
    decay = _softplus(decay + tl.load(bias_ptr + head))
    kept = tl.exp(-tl.exp(tl.load(log_rate_ptr + head)) * decay)
    slot, has_state = tl.load(slot_ptr + row), tl.load(fresh_ptr + row) == 0
    inside = is_key[:, None] & is_value[None, :]
    places = (slot * HEADS + head) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    state = tl.load(state_ptr + places, mask=inside & has_state, other=0.0) * kept
    change = (value - tl.sum(key[:, None] * state, 0)) * rate
    state += key[:, None] * change[None, :]
    tl.store(state_ptr + places, state, mask=inside)
    out = tl.sum(query[:, None] * state, 0)
    out *= tl.rsqrt(tl.sum(out * out, 0) / VALUE + eps)
    out *= tl.load(norm_ptr + values, mask=is_value, other=0.0).to(tl.float32)
    columns = tl.load(gate_place_ptr + head * VALUE + values, mask=is_value, other=0)
    gate = tl.load(row_ptr + columns, mask=is_value, other=0.0)
    out *= _silu(gate.to(tl.float32))
    tl.store(out_ptr + (row * HEADS + head) * VALUE + values, out.to(gate.dtype), mask=is_value)


@triton.jit
def _state_space(
    mixed_ptr,
    gate_ptr,
    step_ptr,
    state_ptr,
    slot_ptr,
    fresh_ptr,
    rate_ptr,
    bias_ptr,
    skip_ptr,
    out_ptr,
    mixed_row,
    x_row,
    least,
    most,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """State space step of a head with skip, times SiLU of its gate, float32; `mixed_ptr`: inputs, B, C."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, sizes = tl.arange(0, DIMS), tl.arange(0, SIZES)
    is_dim, is_size = dims < DIM, sizes < SIZE
    mixed = mixed_ptr + row * mixed_row
    x = tl.load(mixed + head * DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    at = mixed + HEADS * DIM + head // SHARED * SIZE + sizes
    into = tl.load(at, mask=is_size, other=0.0).to(tl.float32)
    out_of = tl.load(at + HEADS // SHARED * SIZE, mask=is_size, other=0.0).to(tl.float32)
    length = tl.load(step_ptr + row * x_row + head).to(tl.float32) + tl.load(bias_ptr + head)
    length = tl.minimum(tl.maximum(_softplus(length), least), most)
    kept = tl.exp(length * tl.load(rate_ptr + head))
    slot, has_state = tl.load(slot_ptr + row), tl.load(fresh_ptr + row) == 0
    inside = is_dim[:, None] & is_size[None, :]
    places = (slot * HEADS + head) * (DIM * SIZE) + dims[:, None] * SIZE + sizes[None, :]
    state = tl.load(state_ptr + places, mask=inside & has_state, other=0.0) * kept
    state += (x * length)[:, None] * into[None, :]
    tl.store(state_ptr + places, state, mask=inside)
    out = tl.sum(state * out_of[None, :], 1) + x * tl.load(skip_ptr + head)
    gate = tl.load(gate_ptr + row * x_row + head * DIM + dims, mask=is_dim, other=0.0)
    out *= _silu(gate.to(tl.float32))
    tl.store(out_ptr + (row * HEADS + head) * DIM + dims, out, mask=is_dim)


@triton.jit
def _group_norm(x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    """RMSNorm of each group of float32 rows. Grid: rows, groups."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < size
    offset = (row * tl.num_programs(1) + group) * size + lanes
    x = tl.load(x_ptr + offset, mask=mask, other=0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    x *= tl.load(weight_ptr + group * size + lanes, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, x.to(out_ptr.dtype.element_ty), mask=mask)


class TritonRecurrence:
    """`RecurrentKernel` in one launch a method, two for the state space step."""

    def conv(self, call: ConvCall) -> torch.Tensor:
        x, states, rows, weight, bias, places, activated, gated = call
        channels, kernel = weight.shape
        out = x.new_empty(len(x), channels)
        _conv[(len(x), -(-channels // CHANNELS.value))](
            *(x, places, states, rows.slots, rows.fresh, weight, bias, out),
            *(x.stride(0), channels),
            KERNEL=kernel,
            TAPS=power_of_two(kernel),
            ACTIVATED=activated,
            GATED=gated,
            num_warps=4,
        )
        return out

    def delta(self, call: DeltaCall) -> torch.Tensor:
        mixed, projected, places, states, rows, weights, spec = call
        out = projected.new_empty(len(mixed), spec.values_width)
        _delta[(len(mixed), spec.num_value_heads)](
            *(mixed, projected, *places[1:], states, rows.slots, rows.fresh),
            *(weights.log_rate, weights.step_bias, weights.norm, out),
            *(projected.stride(0), weights.eps),
            HEADS=spec.num_value_heads,
            SHARED=spec.num_value_heads // spec.num_key_heads,
            KEY=spec.key_dim,
            VALUE=spec.value_dim,
            KEYS=power_of_two(spec.key_dim),
            VALUES=power_of_two(spec.value_dim),
            LEAST_SUM=LEAST_SQUARES,
            SCALE=spec.key_dim**-0.5,
            num_warps=8,
        )
        return out

    def state_space(self, call: StateSpaceCall) -> torch.Tensor:
        mixed, (gate, length), states, rows, weights, spec = call
        gated = torch.empty(len(mixed), spec.width, device=mixed.device)
        out = gate.new_empty(len(mixed), spec.width)
        _state_space[(len(mixed), spec.num_heads)](
            *(mixed, gate, length, states, rows.slots, rows.fresh),
            *(weights.rate, weights.step_bias, weights.skip, gated),
            *(mixed.stride(0), gate.stride(0), *spec.step_limit),
            HEADS=spec.num_heads,
            SHARED=spec.num_heads // spec.num_groups,
            DIM=spec.head_dim,
            SIZE=spec.state_size,
            DIMS=power_of_two(spec.head_dim),
            SIZES=power_of_two(spec.state_size),
            num_warps=4,
        )
        groups, size = weights.norm.shape
        _group_norm[(len(mixed), groups)](
            gated, weights.norm, out, size, weights.eps, BLOCK=power_of_two(size), num_warps=8
        )
        return out
