"""Calling the C kernels of linear layers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import torch

from ..activations.quantized_activations import QuantizedActivations
from ..common.build import Native, native
from ..common.launch import launch
from .grid import Grid
from .native_pack import PackedWeight

InputDtype = Literal["int8", "bfloat16", "float32"]
_INPUT_DTYPES: dict[str, int] = {"int8": 0, "bfloat16": 1, "float32": 2}
_MAX_STEPS = {"int8": 512, "bfloat16": 256, "float32": 256}
"""What a block unpacks to stays in the first-level cache, and sums of 8-bit codes are exact as floats."""


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
        ("input_dtype", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("levels", ctypes.c_float),
        ("fixed_scale", ctypes.c_float),
        ("threshold", ctypes.c_float),
    ]


def native_linear() -> Native:
    """The compiled kernels of linear layers, or why there are none."""
    return native(Path(__file__).with_name("linear.c"))


def has_bf16() -> bool:
    """Whether the kernels multiply bfloat16 by bfloat16; else such inputs are widened to float32."""
    library = native_linear().library
    return library is not None and bool(library.llmopt_has_bf16())


class PackedLinear:
    """`y = x @ weight.T`, with the weight as it was packed and the inputs in one of three forms.

    A row's result does not depend on the rows beside it.

    Args:
        grid: the weight.
        way: what the products are made of. "int8" rounds every row of the input to 8 bits.
        levels: codes that the largest magnitude of a row takes in 8 bits.
        fixed_scale: the scale of 8-bit inputs where calibration chose it.
        threshold: 8-bit inputs from here up count as 0.
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x [rows, in]` in bfloat16 or float32; the result is in the same."""
        return self._multiply(x, None, x.dtype)

    def of_quantized(self, x: QuantizedActivations, dtype: torch.dtype) -> torch.Tensor:
        """Of rows in int8, with a scale each; the result is in `dtype`."""
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
        """Add `bias [out]` to every row, before it is rounded to the dtype of the input."""
        self._bias = bias.to(torch.float32).contiguous()
        self.weight_bytes += self._bias.nbytes

    def columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Weights of some input channels, float32 `[out, columns]`; symmetric 8-bit rows only."""
        return self._weight.columns(columns)
