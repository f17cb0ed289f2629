"""Packed-weight GEMM on CPU: ctypes bindings of the C kernels in `linear.c`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import torch
from torch.nn import functional

from ....quant.kinds.lookup.kind import LookupTensor
from ....quant.native.build import Native, native
from ..activations.quantized_activations import QuantizedActivations
from ..common.launch import launch
from .grid import Grid, with_whole_groups, with_whole_table
from .lattice_grid import LatticeGrid
from .lookup import lookup_rows
from .native_pack import CHUNK, PackedWeight, WeightStruct

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
        ("input_block", ctypes.c_int64),
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
        grid: the weight; lookup tables per channel take no int8 inputs.
        input_dtype: dtype of the GEMM's inputs. "int8" quantizes them.
        input_block: the most int8 inputs that share a scale, a multiple of 32; 0: all of a token.
        levels: the int8 code of a block's largest magnitude.
        fixed_scale: static scale of int8 inputs, from calibration; 0: dynamic.
        threshold: int8 inputs of at least this magnitude (outliers) count as 0.
    """

    def __init__(
        self,
        grid: Grid | LatticeGrid | LookupTensor,
        input_dtype: InputDtype,
        *,
        input_block: int = 0,
        levels: float = 127.5,
        fixed_scale: float = 0.0,
        threshold: float = 0.0,
    ) -> None:
        library = native_linear().library
        assert library is not None
        self._run = library.llmopt_linear
        if input_dtype == "bfloat16" and not has_bf16():
            input_dtype = "float32"
        self._out_features, self._in_features = grid.shape
        if isinstance(grid, Grid):
            grid = with_whole_groups(with_whole_table(grid) if input_dtype == "int8" else grid)
        self._weight = PackedWeight(grid, input_block or _MAX_STEPS[input_dtype])
        self.input_block = max(CHUNK, self._weight.struct.step) if input_block else 0
        self._order = grid.order if isinstance(grid, Grid) else None
        self._is_padded = self._order is not None and bool((self._order == self._in_features).any())
        self._input_dtype, self._levels = _INPUT_DTYPES[input_dtype], levels
        self._fixed_scale, self._threshold = fixed_scale, threshold
        self.bias: torch.Tensor | None = None
        self.weight_bytes = self._weight.nbytes

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x [rows, in]` in bfloat16 or float32; the result in `dtype`, by default the same."""
        return self._multiply(x, None, dtype or x.dtype)

    def of_quantized(self, x: QuantizedActivations, dtype: torch.dtype) -> torch.Tensor:
        """The GEMM of quantized activations: int8, a scale per `input_block`; the result is in `dtype`."""
        return self._multiply(x.codes, x.scales, dtype)

    def _multiply(
        self, x: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if self._order is not None:
            x = functional.pad(x, (0, 1)) if self._is_padded else x
            x = x.index_select(1, self._order)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self._out_features, dtype=dtype)
        call = self.call_like(x)
        call.scales = None if scales is None else scales.data_ptr()
        call.y, call.gives_bf16 = y.data_ptr(), dtype is torch.bfloat16
        if rows and launch(self._run, call):
            raise MemoryError(f"no memory for {rows} rows of {self._in_features} inputs")
        return y

    def call_like(self, x: torch.Tensor) -> CallStruct:
        """The C struct of a GEMM of `x [rows, in]`, but for its result, which is in `x`'s dtype."""
        return CallStruct(
            ctypes.addressof(self._weight.struct),
            x.data_ptr(),
            None,
            None,
            None if self.bias is None else self.bias.data_ptr(),
            x.shape[0],
            x.stride(0),
            x.dtype is torch.bfloat16,
            x.dtype is torch.bfloat16,
            self._input_dtype,
            torch.get_num_threads(),
            self.input_block,
            self._levels,
            self._fixed_scale,
            self._threshold,
        )

    @property
    def weight_struct(self) -> WeightStruct:
        """`Weight` of `weight.h`."""
        return self._weight.struct

    @property
    def is_permuted(self) -> bool:
        """Whether the packed weight has its input channels in another order, or padding among them."""
        return self._order is not None

    @property
    def grouping(self) -> tuple[object, ...] | None:
        """Key that is equal where inputs are prepared alike; None: each weight has its own way."""
        weight = self._weight.struct
        if self.is_permuted or self._fixed_scale or self._threshold:
            return None
        shape = (weight.out_features, weight.in_features, weight.step, weight.base)
        offsets = weight.offset_kind > 0
        return (*shape, offsets, self._input_dtype, self.input_block, self._levels)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to every row, in float32, before the cast to the output dtype."""
        self.bias = bias.to(torch.float32).contiguous()
        self.weight_bytes += self.bias.nbytes

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized weights of some output channels, `[ids, in]`; not of fp8 codes, tables per
        channel or permuted inputs."""
        return lookup_rows(self._weight, ids, dtype)

    def columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Dequantized weights of some input channels, float32 `[out, columns]`; symmetric 8-bit only."""
        return self._weight.columns(columns)
