# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Products with weights of 4 or 8 bits, read as they are stored: `x @ ((codes - zeros) * scales).T`.

The codes are repacked once, into tiles that a program reads in one piece. A run of inputs is two halves in
4 bits, one in the low and one in the high bits of its bytes, so that nothing has to be put in order
afterwards. Where there are few outputs, several programs share the inputs of a tile; how many depends on the
weight alone, and so do the numbers of a token. Many tokens are served by floats and torch's own product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ....quant.tensors.base import QuantizedTensor
from ....quant.tensors.integer import IntTensor
from ..activations import round_inputs
from .integer_layout import half_run
from .runtime import power_of_two

MOST_FUSED_TOKENS = 64
"""Tokens from which the weight is made floats for one product. A guess until it is measured on a GPU."""
OUTPUTS = 64
"""Output channels of a tile."""
WANTED_PROGRAMS = 264
"""Two for each multiprocessor of a Hopper GPU."""


@triton.jit
def _weights(packed, half, scale_ptr, zero_ptr, at, ZERO: tl.constexpr, BITS: tl.constexpr):
    """Float32 weights [OUTPUTS, HALF] of a half of a run, with their scales and zeros at `at`."""
    codes = packed
    if BITS == 4:
        codes = (packed >> (half * 4)) & 15
    scale = tl.load(scale_ptr + at).to(tl.float32)
    weight = codes.to(tl.float32)
    if ZERO < 0:
        weight = weight - tl.load(zero_ptr + at).to(tl.float32)[:, None]
    else:
        weight = weight - ZERO
    return weight * scale[:, None]


@triton.jit
def _product(
    x_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    padded_outputs,
    num_runs,
    runs_each,
    x_row,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of outputs, shares of the inputs, tiles of tokens. `out_ptr` [shares, rows, outputs]."""
    HALVES: tl.constexpr = 8 // BITS
    tile = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, HALF)
    within = tl.arange(0, OUTPUTS)[:, None] * HALF + lanes[None, :]
    acc = tl.full([ROWS, OUTPUTS], 0.0, tl.float32)
    for run in range(share * runs_each, tl.minimum(share * runs_each + runs_each, num_runs)):
        packed = tl.load(code_ptr + (tile * num_runs + run) * (OUTPUTS * HALF) + within)
        for half in tl.static_range(HALVES):
            first = (run * HALVES + half) * HALF
            at = (first // GROUP) * padded_outputs + output
            weight = _weights(packed, half, scale_ptr, zero_ptr, at, ZERO, BITS)
            place = x_ptr + row[:, None] * x_row + first + lanes[None, :]
            x = tl.load(place, mask=is_row[:, None], other=0.0)
            weight = weight.to(x.dtype)
            if ROWS == 1:
                acc += tl.sum(weight.to(tl.float32) * x.to(tl.float32), 1)[None, :]
            else:
                acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    place = (share * num_rows + row[:, None]) * num_outputs + output[None, :]
    mask = is_row[:, None] & (output < num_outputs)[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unpack(
    code_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    num_outputs,
    padded_outputs,
    num_runs,
    OUTPUTS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
):
    """The weight as floats [outputs, inputs]. Grid: tiles of outputs, runs."""
    HALVES: tl.constexpr = 8 // BITS
    tile = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, HALF)
    within = tl.arange(0, OUTPUTS)[:, None] * HALF + lanes[None, :]
    packed = tl.load(code_ptr + (tile * num_runs + run) * (OUTPUTS * HALF) + within)
    for half in tl.static_range(HALVES):
        first = (run * HALVES + half) * HALF
        at = (first // GROUP) * padded_outputs + output
        weight = _weights(packed, half, scale_ptr, zero_ptr, at, ZERO, BITS)
        place = output[:, None] * (num_runs * HALVES * HALF) + first + lanes[None, :]
        out = weight.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, out, mask=(output < num_outputs)[:, None])


class IntegerLinear:
    """A weight of integer codes in 4 or 8 bits, and inputs in floats."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, IntTensor)
        self._scheme, self._input_scale, self._dtype = weight.scheme, weight.input_scale, dtype
        self._outputs, self._inputs = weight.shape
        self._bits = weight.scheme.bits
        self._group = self._inputs // weight.num_groups
        half = half_run(weight.scheme, self._inputs)
        assert half is not None
        self._half, self._halves = half, 8 // self._bits
        self._runs = self._inputs // (half * self._halves)
        short = -self._outputs % OUTPUTS
        self._padded = self._outputs + short
        codes = functional.pad(weight.codes, (0, 0, 0, short))
        tiles = codes.view(self._padded // OUTPUTS, OUTPUTS, self._runs, self._halves, half)
        tiles = tiles.permute(0, 2, 3, 1, 4)
        packed = tiles[:, :, 0] if self._bits == 8 else tiles[:, :, 0] | (tiles[:, :, 1] << 4)
        self._codes = packed.contiguous()
        self._scales = functional.pad(weight.scales, (0, 0, 0, short)).T.contiguous()
        middle = 1 << (self._bits - 1)
        self._zero = float(middle) if bool((weight.zeros == middle).all()) else -1.0
        self._zeros = self._scales
        self.weight_bytes = self._codes.nbytes + self._scales.nbytes
        if self._zero < 0:
            self._zeros = functional.pad(weight.zeros, (0, 0, 0, short)).T.contiguous()
            self.weight_bytes += self._zeros.nbytes
        shares = min(-(-WANTED_PROGRAMS * OUTPUTS // self._padded), max(1, self._runs // 4))
        self._runs_each = -(-self._runs // shares)
        self._shares = -(-self._runs // self._runs_each)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = round_inputs(x, self._scheme, self._input_scale)
        if x.shape[0] > MOST_FUSED_TOKENS:
            return functional.linear(x, self.dequantize())
        x = x if x.stride(1) == 1 else x.contiguous()
        tokens = x.shape[0]
        if not tokens:
            return x.new_empty(0, self._outputs)
        # A tile of the matrix units has 16 rows at least.
        rows = 1 if tokens == 1 else max(16, power_of_two(tokens))
        dtype = x.dtype if self._shares == 1 else torch.float32
        out = x.new_empty(self._shares, tokens, self._outputs, dtype=dtype)
        grid = (self._padded // OUTPUTS, self._shares, -(-tokens // rows))
        _product[grid](
            x,
            self._codes,
            self._scales,
            self._zeros,
            out,
            tokens,
            self._outputs,
            self._padded,
            self._runs,
            self._runs_each,
            x.stride(0),
            ROWS=rows,
            OUTPUTS=OUTPUTS,
            HALF=self._half,
            GROUP=self._group,
            BITS=self._bits,
            ZERO=self._zero,
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            num_warps=4,
            num_stages=4,
        )
        return out[0] if self._shares == 1 else out.sum(dim=0).to(x.dtype)

    def dequantize(self) -> torch.Tensor:
        """The weight as floats [out, in]."""
        out = self._codes.new_empty(self._outputs, self._inputs, dtype=self._dtype)
        _unpack[(self._padded // OUTPUTS, self._runs)](
            self._codes,
            self._scales,
            self._zeros,
            out,
            self._outputs,
            self._padded,
            self._runs,
            OUTPUTS=OUTPUTS,
            HALF=self._half,
            GROUP=self._group,
            BITS=self._bits,
            ZERO=self._zero,
            num_warps=4,
        )
        return out
