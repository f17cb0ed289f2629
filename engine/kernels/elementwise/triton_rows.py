# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Row kernels in Triton: activation quantization, fused add + RMSNorm, and gated activations (SwiGLU, GeGLU).

Quantization per token or group is, up to rounding, `fake_quantize_activations`; norms and gates can quantize
their output as they store it.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl

from ....quant.base.scheme import E4M3_MAX
from ..common.devices import dependent_launch, or_unread, power_of_two
from ..common.triton_language import await_predecessor
from .reference import RUN, ActivationQuant, GatedActivation, QuantizedActivations


class RowRounding(NamedTuple):
    """Compile-time part of a quantization; `run`: the group size, 0 of rows that stay floats."""

    run: int = 0
    levels: float = 0.0
    is_int8: bool = False
    is_fixed: bool = False


@triton.jit
def quantize_block(x, mask, fixed_ptr, TO: tl.constexpr):
    """Scale float32 `x [groups, width]` into the range of its codes; returns it and the scales `[groups]`."""
    if TO.is_fixed:
        scale = tl.load(fixed_ptr) + tl.zeros([x.shape[0]], tl.float32)
    else:
        largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
        scale = tl.div_rn(largest, tl.full([x.shape[0]], TO.levels, tl.float32))
        scale = tl.where(scale > 0.0, scale, 1.0)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if TO.is_int8:
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # Adding 1.5 * 2**23 leaves a float32 no fraction bits: rounds half to even, as torch does.
        x = (x + 12582912.0) - 12582912.0
    else:
        x = tl.minimum(tl.maximum(x, -TO.levels), TO.levels)
    return x, scale


@triton.jit
def store_quantized(x, mask, out, row, SIZE: tl.constexpr, BLOCK: tl.constexpr, TO: tl.constexpr):
    """Quantize and store a row `x [BLOCK]`; `out`: pointers to codes, scales, fixed scale; their number."""
    code_ptr, scale_ptr, fixed_ptr, num_runs = out
    RUN: tl.constexpr = TO.run
    RUNS: tl.constexpr = BLOCK // RUN
    x, mask = tl.reshape(x, [RUNS, RUN]), tl.reshape(mask, [RUNS, RUN])
    x, scale = quantize_block(x, mask, fixed_ptr, TO)
    lanes = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    tl.store(code_ptr + row * SIZE + lanes, x.to(code_ptr.dtype.element_ty), mask=lanes < SIZE)
    run = tl.arange(0, RUNS)
    tl.store(scale_ptr + row * num_runs + run, scale, mask=run < num_runs)


@triton.jit
def _per_token_quant(
    x_ptr,
    code_ptr,
    scale_ptr,
    fixed_ptr,
    x_row,
    size,
    num_runs,
    RUNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TO: tl.constexpr,
):
    """Grid: rows, tiles of groups. `WIDTH` is the power of two that holds a group."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    within = tl.arange(0, WIDTH)
    lanes = run[:, None] * TO.run + within[None, :]
    mask = (within < TO.run)[None, :] & (lanes < size)
    x = tl.load(x_ptr + row * x_row + lanes, mask=mask, other=0.0).to(tl.float32)
    x, scale = quantize_block(x, mask, fixed_ptr, TO)
    tl.store(code_ptr + row * size + lanes, x.to(code_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row * num_runs + run, scale, mask=run < num_runs)


def round_rows(x: torch.Tensor, activation_quant: ActivationQuant) -> QuantizedActivations:
    """Quantize `x [tokens, in]`: codes and scales."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, size = x.shape
    rows = empty_quantized(x, size, activation_quant)
    num_runs = rows.scales.shape[1]
    if tokens:
        to = rounding(activation_quant, size)
        runs, width = min(8, power_of_two(num_runs)), power_of_two(to.run)
        fixed = or_unread(rows.scales, activation_quant.input_scale)
        _per_token_quant[(tokens, -(-num_runs // runs))](
            *(x, rows.codes, rows.scales, *fixed, x.stride(0), size, num_runs),
            RUNS=runs,
            WIDTH=width,
            TO=to,
            num_warps=min(16, max(1, runs * width // 512)),
        )
    return rows


def empty_quantized(
    x: torch.Tensor, size: int, activation_quant: ActivationQuant
) -> QuantizedActivations:
    activations, rows = activation_quant.activations, x.shape[0]
    num_runs = -(-size // RUN) if activations.granularity == "group128" else 1
    dtype = torch.int8 if activations.kind == "int8" else torch.float8_e4m3fn
    codes = torch.empty(rows, size, dtype=dtype, device=x.device)
    return QuantizedActivations(
        codes, torch.empty(rows, num_runs, dtype=torch.float32, device=x.device)
    )


def rounding(activation_quant: ActivationQuant, row: int) -> RowRounding:
    """Compile-time part of `quantize_block` for rows of a program, whose group is `row` elements at most."""
    activations = activation_quant.activations
    run = RUN if activations.granularity == "group128" else row
    is_int8, is_fixed = activations.kind == "int8", activation_quant.input_scale is not None
    return RowRounding(run, 127.5 if is_int8 else E4M3_MAX, is_int8, is_fixed)


def store_arguments(
    rows: QuantizedActivations, activation_quant: ActivationQuant, block: int
) -> dict[str, Any]:
    (fixed,) = or_unread(rows.scales, activation_quant.input_scale)
    num_runs, to = rows.scales.shape[1], rounding(activation_quant, block)
    return {"scale_ptr": rows.scales, "fixed_ptr": fixed, "num_runs": num_runs, "TO": to}


def block_of(size: int) -> int:
    return max(RUN, power_of_two(size))


@triton.jit
def _norm(
    x_ptr,
    added_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    scale_ptr,
    fixed_ptr,
    num_runs,
    x_row,
    added_row,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: rows. The sum is rounded to the stored dtype before its norm is taken, as in torch."""
    await_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < SIZE
    x = tl.load(x_ptr + row * x_row + lanes, mask=mask, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x += tl.load(added_ptr + row * added_row + lanes, mask=mask, other=0.0).to(tl.float32)
        stored_sum = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + lanes, stored_sum, mask=mask)
        x = stored_sum.to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    out = (x * factor * weight).to(x_ptr.dtype.element_ty)
    if TO.run > 0:
        quantized = out_ptr, scale_ptr, fixed_ptr, num_runs
        store_quantized(out.to(tl.float32), mask, quantized, row, SIZE, BLOCK, TO)
    else:
        tl.store(out_ptr + row * SIZE + lanes, out, mask=mask)


class TritonNorm:
    """RMSNorm with a weight [size], of the rows' dtype or of float32."""

    takes_wide_weights: ClassVar[bool] = True

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight.contiguous(), eps

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x [rows, size]` and, of the same shape, `added`; returns their sum and its norm."""
        out = x.new_empty(x.shape)
        unread = {"scale_ptr": out, "fixed_ptr": out, "num_runs": 0, "TO": RowRounding()}
        return self._run(x, added, out, unread), out

    def quantized(
        self, x: torch.Tensor, added: torch.Tensor | None, activation_quant: ActivationQuant
    ) -> tuple[torch.Tensor, QuantizedActivations]:
        rows = empty_quantized(x, x.shape[1], activation_quant)
        arguments = store_arguments(rows, activation_quant, block_of(x.shape[1]))
        return self._run(x, added, rows.codes, arguments), rows

    def _run(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        out: torch.Tensor,
        stored: dict[str, Any],
    ) -> torch.Tensor:
        """Write the norm to `out`; returns the sum."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, size = x.shape
        total = x
        if added is not None:
            added = added if added.stride(1) == 1 else added.contiguous()
            total = x.new_empty(rows, size)
        if rows:
            block = block_of(size)
            _norm[(rows,)](
                *(x, added, total, out, self._weight),
                x_row=x.stride(0),
                added_row=0 if added is None else added.stride(0),
                eps=self._eps,
                SIZE=size,
                BLOCK=block,
                **stored,
                **dependent_launch(x),
                num_warps=min(16, max(1, block // 512)),
            )
        return total


GATE_BLOCK = tl.constexpr(1024)
SWIGLU_ALPHA = tl.constexpr(1.702)
SWIGLU_LIMIT = tl.constexpr(7.0)
"""gpt-oss clamps gate and up to this."""


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """`activation(gate) * up`, rounded to `dtype` after the activation, as torch's two operations are."""
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, SWIGLU_LIMIT)
        up = tl.minimum(tl.maximum(up, -SWIGLU_LIMIT), SWIGLU_LIMIT) + 1.0
        active = gate / (1.0 + tl.exp(gate * -SWIGLU_ALPHA))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    return (active.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _gate(
    gate_ptr, up_ptr, out_ptr, size, gate_row, up_row, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    """Grid: rows, blocks of a row."""
    await_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * GATE_BLOCK + tl.arange(0, GATE_BLOCK)
    mask = lanes < size
    gate = tl.load(gate_ptr + row * gate_row + lanes, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + lanes, mask=mask, other=0.0).to(tl.float32)
    out = activated(gate, up, gate_ptr.dtype.element_ty, ACTIVATION)
    tl.store(out_ptr + row * size + lanes, out, mask=mask)


@triton.jit
def _quantized_gate(
    gate_ptr,
    up_ptr,
    code_ptr,
    scale_ptr,
    fixed_ptr,
    num_runs,
    gate_row,
    up_row,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gated activation with quantized output. Grid: whole rows, because a scale depends on all of a row."""
    await_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < SIZE
    gate = tl.load(gate_ptr + row * gate_row + lanes, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + lanes, mask=mask, other=0.0).to(tl.float32)
    out = activated(gate, up, gate_ptr.dtype.element_ty, ACTIVATION).to(tl.float32)
    quantized = code_ptr, scale_ptr, fixed_ptr, num_runs
    store_quantized(out, mask, quantized, row, SIZE, BLOCK, TO)


class TritonGate:
    """`activation(gate) * up`, of `[rows, size]` each, which may be slices of wider rows."""

    def __init__(self, activation: GatedActivation) -> None:
        self.activation: GatedActivation = activation

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.stride(1) != 1 or up.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        rows, size = gate.shape
        out = gate.new_empty(rows, size)
        if rows:
            given = gate, up, out, size, gate.stride(0), up.stride(0)
            launch = {"ACTIVATION": self.activation, **dependent_launch(out), "num_warps": 4}
            _gate[(rows, -(-size // GATE_BLOCK.value))](*given, **launch)
        return out

    def quantized(
        self, gate: torch.Tensor, up: torch.Tensor, activation_quant: ActivationQuant
    ) -> QuantizedActivations:
        if gate.stride(1) != 1 or up.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        count, size = gate.shape
        rows, block = empty_quantized(gate, size, activation_quant), block_of(size)
        if count:
            _quantized_gate[(count,)](
                *(gate, up, rows.codes),
                gate_row=gate.stride(0),
                up_row=up.stride(0),
                ACTIVATION=self.activation,
                SIZE=size,
                BLOCK=block,
                **store_arguments(rows, activation_quant, block),
                **dependent_launch(gate),
                num_warps=min(16, max(1, block // 512)),
            )
        return rows
