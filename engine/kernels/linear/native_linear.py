"""Quantized linears on the C kernels of `linear.c`, W4A16/W8A16-style, W8A8 and LLM.int8(), and the lookup of
rows of their packed weights in `lookup.c`."""

from __future__ import annotations

import ctypes
from typing import Literal, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ....base.build import beside
from ....quant.base.scheme import E4M3_MAX, Activations, Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.fp4.kind import Fp4Tensor
from ....quant.kinds.ggml.tensor import GgufTensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ..common.graphs import addresses, launch, struct
from ..elementwise.reference import (
    RUN,
    ActivationQuant,
    QuantizedActivations,
    Rows,
    fake_quantize_inputs,
)
from .grid import CHUNK, CodeGrid, LatticeGrid, NativeGrid, with_whole_groups, with_whole_table
from .linear import LinearKernel
from .native_pack import PackedWeight


@runtime_checkable
class LooksUpRows(Protocol):
    """A GEMM kernel whose packed weight is an embedding too: a tied LM head is in memory once."""

    @property
    def weight_bytes(self) -> int: ...

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


_LookupCall = struct("LookupCall", "weight ids y", "rows is_bf16 threads")  # of `lookup.c`

native_lookup = beside(__file__, "lookup.c")

InputDtype = Literal["int8", "bfloat16", "float32"]
_INPUT_DTYPES: dict[str, int] = {"int8": 0, "bfloat16": 1, "float32": 2}
_MAX_STEPS = {"int8": 512, "bfloat16": 256, "float32": 128}
"""Input channels per accumulation step: unpacked they fit half of L1, and int8 sums are exact as floats."""

CallStruct = struct(  # `Call` of `linear.c`
    "Call",
    "weight x scales y bias",
    "rows x_stride is_bf16 gives_bf16 input_dtype threads as_e4m3 input_block",
    *((name, ctypes.c_float) for name in ("levels", "fixed_scale", "threshold")),
)

native_linear = beside(__file__, "linear.c")


def has_bf16() -> bool:
    """True if the kernels have a bfloat16 GEMM; else bfloat16 inputs are widened to float32."""
    library = native_linear().library
    return library is not None and bool(library.llmopt_has_bf16())


class PackedLinear:
    """Mixed-input GEMM `y = x @ weight.T` with a packed weight, in int8, bfloat16 or float32 arithmetic.

    Batch-invariant: a row's result does not depend on the other rows.

    Args:
        grid: the weight; 16-bit floats, a tensor, take no inputs but float32.
        input_dtype: dtype of the GEMM's inputs. "int8" quantizes them.
        input_block: the most int8 inputs that share a scale, a multiple of 32; 0: all of a token.
        levels: the int8 code of a block's largest magnitude.
        fixed_scale: static scale of int8 inputs, from calibration; 0: dynamic.
        threshold: int8 inputs of at least this magnitude (outliers) count as 0.
    """

    def __init__(
        self,
        grid: NativeGrid | torch.Tensor,
        input_dtype: InputDtype,
        *,
        input_block: int = 0,
        levels: float = 127.5,
        fixed_scale: float = 0.0,
        threshold: float = 0.0,
    ) -> None:
        self._run = native_linear().function("llmopt_linear")
        if input_dtype == "bfloat16" and not has_bf16():
            input_dtype = "float32"
        self._out_features, self._in_features = grid.shape
        if isinstance(grid, CodeGrid):
            grid = with_whole_groups(with_whole_table(grid) if input_dtype == "int8" else grid)
        self.weight = PackedWeight(grid, input_block or _MAX_STEPS[input_dtype])
        self.input_block = max(CHUNK, self.weight.struct.step) if input_block else 0
        self._order = grid.order if isinstance(grid, CodeGrid) else None
        # Input channels in another order than the weight's, or with padding among them.
        self.is_permuted = self._order is not None
        self._is_padded = self._order is not None and bool((self._order == self._in_features).any())
        self._input_dtype, self._levels, self._as_e4m3 = _INPUT_DTYPES[input_dtype], levels, False
        self._fixed_scale, self._threshold = fixed_scale, threshold
        self.bias: torch.Tensor | None = None
        self.weight_bytes = self.weight.nbytes

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

    def call_like(self, x: torch.Tensor) -> ctypes.Structure:
        """The C struct of a GEMM of `x [rows, in]`, but for its result, which is in `x`'s dtype."""
        is_bf16, bias = x.dtype is torch.bfloat16, self.bias
        return CallStruct(
            *(ctypes.addressof(self.weight.struct), x.data_ptr(), None, None, *addresses(bias)),
            *(len(x), x.stride(0), is_bf16, is_bf16, self._input_dtype),
            *(torch.get_num_threads(), self._as_e4m3, self.input_block),
            *(self._levels, self._fixed_scale, self._threshold),
        )

    @property
    def grouping(self) -> tuple[object, ...] | None:
        """Key that is equal where inputs are prepared alike; None: each weight has its own way."""
        weight = self.weight.struct
        if self.is_permuted or self._fixed_scale or self._threshold:
            return None
        shape = weight.out_features, weight.in_features, weight.step, weight.base
        inputs = self._input_dtype, self._as_e4m3, self.input_block, self._levels
        return (*shape, weight.offset_kind > 0, *inputs)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to every row, in float32, before the cast to the output dtype."""
        self.bias = bias.to(torch.float32).contiguous()
        self.weight_bytes += self.bias.nbytes

    def fuse_e4m3(self, activations: Activations, input_scale: torch.Tensor | None) -> bool:
        """Round float inputs to e4m3 as they are prepared; False where that is not possible."""
        in_groups = activations.granularity == "group128"
        if activations.kind != "fp8" or (in_groups and self.is_permuted):
            return False
        self._as_e4m3, self._levels, self.input_block = True, E4M3_MAX, RUN if in_groups else 0
        if not activations.dynamic and input_scale is not None:
            self._fixed_scale = float(input_scale)
        return True

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized rows, [ids, in]; not of fp8 codes, tables per channel or permuted inputs."""
        y = torch.empty(len(ids), self.weight.struct.in_features, dtype=dtype)
        pointers = ctypes.addressof(self.weight.struct), *addresses(ids, y)
        numbers = len(ids), dtype is torch.bfloat16, torch.get_num_threads()
        launch(native_lookup().function("llmopt_lookup"), _LookupCall(*pointers, *numbers))
        return y


OPTIONAL_LEVELS = 127.0
"""int8 code of a token's largest input where 8-bit inputs are the user's option: it is then exact."""
GGUF_BLOCK = 32
"""Input channels that share an activation scale with GGUF weights, as in ggml's Q8_0 and Q8_1."""
OPTIONAL_BLOCK = 128
"""The most of them with other weights: the scales of a group are applied at once."""


class HalfLinear(PackedLinear):
    """GEMM of float32 inputs with an unquantized weight of 16 bits, which is widened in registers."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight, "float32")


class Packed16Linear(PackedLinear):
    """Mixed-input GEMM (W4A16, W8A16): inputs in the engine's dtype, float32 accumulation. Where the scheme
    quantizes activations in a way that has no integer GEMM, they are fake-quantized: to fp8 as the GEMM
    prepares them, else by torch."""

    def __init__(self, weight: QuantizedTensor, grid: NativeGrid, dtype: torch.dtype) -> None:
        super().__init__(grid, "bfloat16" if dtype is torch.bfloat16 else "float32")
        self._scheme: Scheme = weight.scheme
        self._input_scale = weight.parts().get("input_scale")
        activations = weight.scheme.activations
        is_fused = activations is not None and self.fuse_e4m3(activations, self._input_scale)
        self.quantizes_inputs = activations is not None and not is_fused

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if self.quantizes_inputs:
            x = fake_quantize_inputs(x, self._scheme, self._input_scale)
        return super().__call__(x, dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self(x, torch.float32)


class Packed8Linear(PackedLinear):
    """Integer GEMM with int8 inputs: scales static, or per token as the scheme says, else per block."""

    def __init__(
        self, weight: QuantizedTensor, grid: CodeGrid | LatticeGrid, dtype: torch.dtype
    ) -> None:
        assert isinstance(weight, IntTensor | GgufTensor | Fp4Tensor)
        levels, fixed_scale, self._dtype = OPTIONAL_LEVELS, 0.0, dtype
        block = GGUF_BLOCK if isinstance(weight, GgufTensor) else OPTIONAL_BLOCK
        if isinstance(weight, IntTensor) and weight.scheme.activations is not None:
            levels, block = 127.5, 0
            if weight.input_scale is not None:
                fixed_scale = float(weight.input_scale)
        super().__init__(grid, "int8", input_block=block, levels=levels, fixed_scale=fixed_scale)
        if fixed_scale == 0.0 and not (block and self.is_permuted):
            self.activation_quant = ActivationQuant(
                Activations("int8"), int8_levels=levels, block=self.input_block
            )

    def __call__(self, x: Rows, dtype: torch.dtype | None = None) -> torch.Tensor:
        if isinstance(x, QuantizedActivations):
            return self.of_quantized(x, self._dtype)
        return super().__call__(x, dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self(x, torch.float32)


class PackedOutlierLinear(PackedLinear):
    """LLM.int8(): outlier inputs (magnitude >= threshold) in a float matmul, the others in an int8 GEMM."""

    def __init__(self, weight: VectorwiseTensor, grid: CodeGrid) -> None:
        super().__init__(grid, "int8", levels=127.0, threshold=weight.scheme.threshold)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        y = super().__call__(x, dtype)
        if self._threshold > 0:
            outliers = x.where(x.abs() >= self._threshold, 0.0)
            columns = outliers.any(dim=0).nonzero().flatten()
            if columns.numel():
                wide = outliers[:, columns].float() @ self.weight.columns(columns).T
                y = (y.float() + wide).to(y.dtype)
        return y


def packed_of(kernel: LinearKernel | None) -> PackedLinear | None:
    """The kernel, if the packed GEMM is all that it does; None: it does more, or is another kernel."""
    if not isinstance(kernel, Packed8Linear | Packed16Linear | HalfLinear):
        return None
    if isinstance(kernel, Packed16Linear) and kernel.quantizes_inputs:
        return None
    return kernel if kernel.grouping is not None else None


INT8_KINDS = ("int", "vectorwise")
"""Kinds whose weights multiply int8 inputs that their schemes ask for."""


def wants_8_bit_inputs(scheme: Scheme, input_bits: int) -> bool:
    """True for an integer GEMM: the scheme asks for it, or leaves it open and `input_bits` is 8."""
    activations: Activations | None = scheme.activations
    if activations is None:
        return input_bits == 8
    whole = activations.kind == "int8" and activations.granularity != "group128"
    return whole and scheme.kind_name in INT8_KINDS
