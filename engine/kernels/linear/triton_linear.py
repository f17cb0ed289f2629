"""Quantized linears on the Triton GEMM: weight-only (W4A16, W8A16), and W8A8 with int8 or fp8 activations.

The crossover between the fused GEMM and dequantize + cuBLAS, in tokens per call, is measured once per device
and shape, and kept in the device's verdict table (`common/verdicts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from ....quant.kinds.base.tensor import QuantizedTensor
from ..common.verdicts import current_verdicts, seconds_of
from ..elementwise.reference import (
    ActivationQuant,
    QuantizedActivations,
    Rows,
    fake_quantize_inputs,
)
from ..elementwise.triton_rows import round_rows
from .triton_dequantize import dequantize
from .triton_gemm import gemm
from .triton_packed_weight import TritonPackedWeight

TOKENS = (16, 32, 64, 128, 256)
"""Batch sizes that are measured, in order, until cuBLAS is faster."""
DEFAULT_CROSSOVER = 64
"""The crossover where nothing is measured: in the interpreter, and where memory does not suffice."""

FAST_INPUTS = 4096
"""Inputs up to which e4m3 products are summed in the tensor core's 14 bits: an error of nearly 2 % at most,
where the codes' own is 6 % (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""

Gemm = Callable[[torch.Tensor], torch.Tensor]


def crossover_tokens(name: str, inputs: torch.Tensor, fused: Gemm, dequantized: Gemm) -> int:
    """Most of `TOKENS` for which `fused` is no slower than `dequantized`, else 1; `name` is the key."""
    verdicts = current_verdicts() if inputs.device.type == "cuda" else None
    if verdicts is None:
        return DEFAULT_CROSSOVER

    def is_faster(tokens: int) -> bool:
        from triton.runtime.errors import OutOfResources

        try:
            few = inputs[:tokens]
            ours, cublas = (seconds_of(partial(gemm, few)) for gemm in (fused, dequantized))
            return ours.median <= cublas.median
        except OutOfResources:
            return False  # a small GPU lacks the shared memory for this batch size

    try:
        return verdicts.crossover(name, lambda: last_faster_size(is_faster))
    except torch.OutOfMemoryError:
        return DEFAULT_CROSSOVER


def last_faster_size(is_faster: Callable[[int], bool]) -> int:
    """The last of `TOKENS` before the first that is not faster; 1 if the first is not."""
    last = 1
    for tokens in TOKENS:
        if not is_faster(tokens):
            break
        last = tokens
    return last


class FloatInputLinear:
    """Weight-only quantized linear: fused GEMM up to the crossover, dequantize + cuBLAS above it."""

    def __init__(
        self, weight: QuantizedTensor, tiles: TritonPackedWeight, dtype: torch.dtype
    ) -> None:
        self._scheme, self._input_scale = weight.scheme, weight.parts().get("input_scale")
        self.tiles, self._dtype = tiles, dtype
        self.decoded = tiles.with_table_in(dtype)
        self.quantizes_inputs = weight.scheme.activations is not None
        self.weight_bytes = tiles.weight_bytes
        self._crossover = _crossover(weight, tiles, dtype, self._fused, self._as_floats)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = fake_quantize_inputs(x, self._scheme, self._input_scale)
        return (self._fused if len(x) <= self._crossover else self._as_floats)(x)

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        return gemm(x, self.decoded, self._dtype)

    def _as_floats(self, x: torch.Tensor) -> torch.Tensor:
        if self.tiles.order is not None:
            x = x.index_select(1, self.tiles.order)
        return functional.linear(x, dequantize(self.tiles, self._dtype))


class QuantizedInputLinear:
    """W8A8 by int8 or e4m3 codes; above the crossover, e4m3 per channel and token uses `_scaled_mm`."""

    def __init__(
        self, weight: QuantizedTensor, tiles: TritonPackedWeight, dtype: torch.dtype
    ) -> None:
        activations, scale = weight.scheme.activations, weight.parts().get("input_scale")
        self.activation_quant = ActivationQuant(
            activations, None if scale is None else scale.to(torch.float32)
        )
        self.tiles, self._dtype = tiles, dtype
        self.weight_bytes = tiles.weight_bytes
        self._row_scales: torch.Tensor | None = None
        is_plain = tiles.grid.group == 0 and activations.granularity != "group128"
        is_fp8 = tiles.codes.dtype is torch.float8_e4m3fn
        if is_fp8 and is_plain and dtype is torch.bfloat16:
            self._row_scales = tiles.scales.to(torch.float32)
            scales = self._row_scales
            self._crossover = _crossover(
                *(weight, tiles, dtype),
                lambda x: self._fused(round_rows(x, self.activation_quant)),
                lambda x: self._scaled(round_rows(x, self.activation_quant), scales),
            )

    def __call__(self, x: Rows) -> torch.Tensor:
        rows = x if isinstance(x, QuantizedActivations) else round_rows(x, self.activation_quant)
        if self._row_scales is None or len(rows.codes) <= self._crossover:
            return self._fused(rows)
        return self._scaled(rows, self._row_scales)

    def _fused(self, rows: QuantizedActivations) -> torch.Tensor:
        return gemm(rows.codes, self.tiles, self._dtype, rows.scales)

    def _scaled(self, rows: QuantizedActivations, scales: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._scaled_mm(
            *(rows.codes, self.tiles.codes.t(), rows.scales, scales),
            out_dtype=self._dtype,
            use_fast_accum=rows.codes.shape[1] <= FAST_INPUTS,
        )
        return y[:, : self.tiles.out_features]


def _crossover(
    weight: QuantizedTensor,
    tiles: TritonPackedWeight,
    dtype: torch.dtype,
    fused: Gemm,
    dequantized: Gemm,
) -> int:
    name = f"{weight.scheme.label}, {tiles.out_features} x {tiles.in_features}, {dtype}"
    x = torch.ones(max(TOKENS), tiles.in_features, dtype=dtype, device=tiles.codes.device)
    return crossover_tokens(name, x, fused, dequantized)
