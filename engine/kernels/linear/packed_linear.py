"""Quantized linears on the C kernels: W4A16/W8A16-style, W8A8 and LLM.int8()."""

from __future__ import annotations

import torch

from ....quant.base.scheme import Activations, Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.fp4.kind import Fp4Tensor
from ....quant.kinds.ggml.tensor import GgufTensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.integer.scheme import IntScheme
from ....quant.kinds.lookup.kind import LookupTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ....quant.kinds.vectorwise.scheme import VectorwiseScheme
from ..activations.fake_quantize import fake_quantize_inputs
from ..activations.quantized_activations import ActivationQuant, QuantizedActivations, Rows
from .grid import Grid
from .lattice_grid import LatticeGrid
from .linear import LinearKernel
from .native_linear import InputDtype, PackedLinear

OPTIONAL_LEVELS = 127.0
"""int8 code of a token's largest input where 8-bit inputs are an option of the user, not of the scheme.

The largest input is then exact; compressed-tensors' 127.5 is half a step off.
"""
GGUF_BLOCK = 32
"""Input channels that share an activation scale with GGUF weights, as in ggml's Q8_0 and Q8_1."""
OPTIONAL_BLOCK = 128
"""The most of them with other weights: the scales of a group are applied at once."""


class _Packed:
    """Base of the linears: the packed GEMM, its weight bytes and its fused bias."""

    def __init__(self, linear: PackedLinear) -> None:
        self.linear = linear

    @property
    def weight_bytes(self) -> int:
        return self.linear.weight_bytes

    def fuse_bias(self, bias: torch.Tensor) -> None:
        self.linear.fuse_bias(bias)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the dequantized weight, [ids, in]."""
        return self.linear.rows(ids, dtype)


class Packed16Linear(_Packed):
    """Mixed-input GEMM (W4A16, W8A16): inputs in the engine's dtype, float32 accumulation.

    Where the scheme quantizes activations in a way that has no integer GEMM, they are fake-quantized.
    """

    def __init__(
        self,
        weight: QuantizedTensor,
        grid: Grid | LatticeGrid | LookupTensor,
        dtype: torch.dtype,
    ) -> None:
        self._scheme: Scheme = weight.scheme
        self.quantizes_inputs = weight.scheme.activations is not None
        self._input_scale = weight.parts().get("input_scale")
        input_dtype: InputDtype = "bfloat16" if dtype is torch.bfloat16 else "float32"
        super().__init__(PackedLinear(grid, input_dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self._rounded(x))

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        return self.linear(self._rounded(x), torch.float32)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quantize_inputs(x, self._scheme, self._input_scale)


class Packed8Linear(_Packed):
    """Integer GEMM with int8 inputs: static scales, or dynamic ones per token or per block.

    A scheme that asks for int8 inputs has them per token; blocks are for inputs that it leaves open.
    """

    def __init__(
        self, weight: QuantizedTensor, grid: Grid | LatticeGrid, dtype: torch.dtype
    ) -> None:
        assert isinstance(weight, IntTensor | GgufTensor | Fp4Tensor)
        levels, fixed_scale, self._dtype = OPTIONAL_LEVELS, 0.0, dtype
        block = GGUF_BLOCK if isinstance(weight, GgufTensor) else OPTIONAL_BLOCK
        if isinstance(weight, IntTensor) and weight.scheme.activations is not None:
            levels, block = 127.5, 0
            if weight.input_scale is not None:
                fixed_scale = float(weight.input_scale)
        linear = PackedLinear(
            grid, "int8", input_block=block, levels=levels, fixed_scale=fixed_scale
        )
        super().__init__(linear)
        if fixed_scale == 0.0 and not (block and linear.is_permuted):
            self.activation_quant = ActivationQuant(
                Activations("int8"), int8_levels=levels, block=linear.input_block
            )

    def __call__(self, x: Rows) -> torch.Tensor:
        if isinstance(x, QuantizedActivations):
            return self.linear.of_quantized(x, self._dtype)
        return self.linear(x)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        return self.linear(x, torch.float32)


class PackedOutlierLinear(_Packed):
    """LLM.int8(): outlier inputs (magnitude >= threshold) in a float matmul, the others in an int8 GEMM."""

    def __init__(self, weight: VectorwiseTensor, grid: Grid) -> None:
        self._threshold = weight.scheme.threshold
        super().__init__(PackedLinear(grid, "int8", levels=127.0, threshold=self._threshold))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self._threshold > 0:
            outliers = x.where(x.abs() >= self._threshold, 0.0)
            columns = outliers.any(dim=0).nonzero().flatten()
            if columns.numel():
                wide = outliers[:, columns].float() @ self.linear.columns(columns).T
                y = (y.float() + wide).to(x.dtype)
        return y


def packed_of(kernel: LinearKernel | None) -> PackedLinear | None:
    """The packed GEMM that is all a kernel does; None: it does more, or is another kernel."""
    if not isinstance(kernel, Packed8Linear | Packed16Linear):
        return None
    if isinstance(kernel, Packed16Linear) and kernel.quantizes_inputs:
        return None
    return kernel.linear if kernel.linear.grouping is not None else None


def wants_8_bit_inputs(scheme: Scheme, input_bits: int) -> bool:
    """Whether to use an integer GEMM: the scheme asks for one, or leaves it open and `input_bits` is 8."""
    if isinstance(scheme, VectorwiseScheme):
        return True
    activations: Activations | None = scheme.activations
    if activations is None:
        return input_bits == 8
    whole = activations.kind == "int8" and activations.granularity != "group128"
    return whole and isinstance(scheme, IntScheme)
