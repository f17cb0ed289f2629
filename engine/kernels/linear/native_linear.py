"""Packed-weight GEMM on CPU: ctypes bindings of the C kernels in `linear.c`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import torch

from ..activations.quantized_activations import QuantizedActivations
from ..common.build import Native, native
from ..common.launch import launch
from .grid import Grid
from .lookup import lookup_rows
from .native_pack import PackedWeight

InputDtype = Literal["int8", "bfloat16", "float32"]
_INPUT_DTYPES: dict[str, int] = {"int8": 0, "bfloat16": 1, "float32": 2}
_MAX_STEPS = {"int8": 512, "bfloat16": 256, "float32": 256}
"""Input channels per accumulation step: an unpacked block fits L1, and int8 sums are exact as floats."""


class CallStruct(ctypes.Structure):
    """`Call` of `linear.c`."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("gives_bf16", ctypes.c_int64),
        ("input_dtype", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("levels", ctypes.c_float),
        ("fixed_scale", ctypes.c_float),
        ("threshold", ctypes.c_float),
    ]


def native_linear() -> Native:
    """The compiled kernels, or the reason why there are none."""
    return native(Path(__file__).with_name("linear.c"))


def has_bf16() -> bool:
    """Whether the kernels have a bfloat16 GEMM; else bfloat16 inputs are widened to float32."""
    library = native_linear().library
    return library is not None and bool(library.llmopt_has_bf16())


class PackedLinear:
    """Mixed-input GEMM `y = x @ weight.T` with a packed weight, in int8, bfloat16 or float32 arithmetic.

    Batch-invariant: a row's result does not depend on the other rows.

    Args:
        grid: the weight.
        input_dtype: dtype of the GEMM's inputs. "int8" quantizes them per token.
        levels: the int8 code of a row's largest magnitude.
        fixed_scale: static scale of int8 inputs, from calibration; 0: dynamic.
        threshold: int8 inputs of at least this magnitude (outliers) count as 0.
    """

    def __init__(
        self,
        grid: Grid,
        input_dtype: InputDtype,
        *,
        levels: float = 127.5,
        fixed_scale: float = 0.0,
        threshold: float = 0.0,
    ) -> None:
        library = native_linear().library
        assert library is not None
        self._run = library.llmopt_linear
        if input_dtype == "bfloat16" and not has_bf16():
            input_dtype = "float32"
        self._weight = PackedWeight(grid, _MAX_STEPS[input_dtype])
        self._order = grid.order
        self._out_features, self._in_features = grid.codes.shape
        self._input_dtype, self._levels = _INPUT_DTYPES[input_dtype], levels
        self._fixed_scale, self._threshold = fixed_scale, threshold
        self._bias: torch.Tensor | None = None
        self.weight_bytes = self._weight.nbytes

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x [rows, in]` in bfloat16 or float32; the result in `dtype`, by default the same."""
        return self._multiply(x, None, dtype or x.dtype)

    def of_quantized(self, x: QuantizedActivations, dtype: torch.dtype) -> torch.Tensor:
        """The GEMM of quantized activations: int8, one scale per token; the result is in `dtype`."""
        return self._multiply(x.codes, x.scales, dtype)

    def _multiply(
        self, x: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self._out_features, dtype=dtype)
        call = CallStruct(
            ctypes.addressof(self._weight.struct),
            x.data_ptr(),
            None if scales is None else scales.data_ptr(),
            y.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            rows,
            x.stride(0),
            x.dtype is torch.bfloat16,
            dtype is torch.bfloat16,
            self._input_dtype,
            torch.get_num_threads(),
            self._levels,
            self._fixed_scale,
            self._threshold,
        )
        if rows and launch(self._run, call):
            raise MemoryError(f"no memory for {rows} rows of {self._in_features} inputs")
        return y

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to every row, in float32, before the cast to the output dtype."""
        self._bias = bias.to(torch.float32).contiguous()
        self.weight_bytes += self._bias.nbytes

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized weights of some output channels, `[ids, in]`; not of fp8 codes or permuted inputs."""
        return lookup_rows(self._weight, ids, dtype)

    def columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Dequantized weights of some input channels, float32 `[out, columns]`; symmetric 8-bit only."""
        return self._weight.columns(columns)
