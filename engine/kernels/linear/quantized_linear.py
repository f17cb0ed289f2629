"""Quantized linears: dispatch over GEMM kernels for packed weights, `y = x @ ((codes - zeros) * scales).T`.

The weight is repacked once at load, into the kernel's layout. No kernel keeps a floating-point copy of
it: the fallback dequantizes one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from ....quant.base.errors import BadInput
from ....quant.base.scheme import PER_CHANNEL, Scheme
from ....quant.kinds.base.format import pack_words, unpack_words
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.codebook.kind import CodebookTensor
from ....quant.kinds.e8p.scheme import E8pScheme
from ....quant.kinds.fp4.kind import Fp4Tensor
from ....quant.kinds.fp4.scheme import Fp4Scheme
from ....quant.kinds.fp8.scheme import FloatScheme
from ....quant.kinds.ggml.lattice import LATTICES
from ....quant.kinds.ggml.scheme import GgufScheme
from ....quant.kinds.ggml.tensor import GgufTensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.integer.scheme import IntScheme
from ....quant.kinds.lookup.kind import LookupTensor
from ....quant.kinds.lookup.scheme import LookupScheme
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ....quant.kinds.vectorwise.scheme import VectorwiseScheme
from ..activations.fake_quantize import fake_quantize_inputs
from ..common.dispatch import Candidate, NoKernel, Operation
from ..common.runtime import refuses_fp8, refuses_rows
from ..hadamard.e8p_linear import E8pLinear, NativeE8pLinear
from ..hadamard.native_hadamard import FLOAT_BITS
from ..hadamard.refusals import E8P, TRELLIS, HadamardKernels
from ..hadamard.trellis_linear import NativeTrellisLinear, TransformedLinear
from ..hadamard.triton_candidates import refuses_triton_codes, triton_codes
from .deep_gemm import DeepGemmLinear, refuses_deep_gemm
from .grid import TABLE_BLOCKS, WHOLE_BLOCKS, Grid, grid_of, refuses_grid
from .int8_linear import Int8MatmulLinear, VectorwiseLinear
from .lattice_grid import LatticeGrid, lattice_grid
from .linear import LinearKernel
from .marlin import MarlinLinear, refuses_marlin
from .native_linear import native_linear
from .packed_linear import (
    Packed8Linear,
    Packed16Linear,
    PackedOutlierLinear,
    wants_8_bit_inputs,
)
from .trial import linear_trial
from .triton_packed_weight import pack_weight, piece_of, refuses_packing, scale_group

MAX_INPUTS = 2**20


@dataclass(frozen=True, slots=True)
class QuantizedLinearKernelQuery:
    """Kernel query of a quantized linear: device, dtype, shape, scheme.

    `dtype` is the activations'; with `input_bits` 8 a kernel may quantize them where the scheme does not
    ask for it.
    """

    device: str
    dtype: torch.dtype
    out_features: int
    in_features: int
    scheme: Scheme
    input_bits: int = 16

    def __str__(self) -> str:
        shape = f"{self.out_features} × {self.in_features}"
        quantized = " quantized to 8 bits" if self.input_bits == 8 else ""
        inputs = f"activations in {self.dtype}{quantized}"
        return f"{shape}, {self.scheme.label}, {inputs} on {self.device}"


class TiledDequantLinear:
    """The reference: dequantize `TILE_ROWS` output channels at a time, then `functional.linear`.

    It supports every scheme on every device, in the activations' dtype; its codes are held without gaps.
    """

    TILE_ROWS = 1024

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows = weight.out_features
        self._held = _DenseCodes(weight) if _DenseCodes.fits(weight) else _in_memory(weight)
        self._scheme: Scheme = weight.scheme
        self._input_scale = weight.parts().get("input_scale")
        self.weight_bytes = self._held.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = fake_quantize_inputs(x, self._scheme, self._input_scale)
        tiles = [
            functional.linear(x, self._tile(slice(begin, begin + self.TILE_ROWS)))
            for begin in range(0, self._rows, self.TILE_ROWS)
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)

    def _tile(self, rows: slice) -> torch.Tensor:
        """Dequantized weights of some output channels, [rows, in]."""
        return self._held.rows(rows).dequantize(self._dtype)


def _in_memory(weight: QuantizedTensor) -> QuantizedTensor:
    """The weight without views of a mapped file, which may be written while the model serves."""
    anything: Any = weight
    mapped = {n: p for n, p in weight.parts().items() if not p.untyped_storage().resizable()}
    return replace(anything, **{name: part.clone() for name, part in mapped.items()})


class _DenseCodes:
    """A weight with codes of fewer than 8 bits as bit streams, a row of words for each output channel."""

    def __init__(self, weight: QuantizedTensor) -> None:
        codes = weight.parts()["codes"]
        self._bits, self._in_features = weight.scheme.bits, weight.in_features
        self._words = pack_words(codes, self._bits)
        # The weight without its codes: a single expanded byte is their placeholder.
        self._rest = _with_codes(weight, codes.new_zeros(1, 1).expand(codes.shape))
        self.nbytes = self._words.nbytes + weight.nbytes - codes.nbytes

    @staticmethod
    def fits(weight: QuantizedTensor) -> bool:
        kinds = IntTensor | CodebookTensor | Fp4Tensor | LookupTensor
        return isinstance(weight, kinds) and weight.scheme.bits < 8

    def rows(self, rows: slice) -> QuantizedTensor:
        codes = unpack_words(self._words[rows], self._bits)[:, : self._in_features].contiguous()
        return _with_codes(self._rest.rows(rows), codes)


def _with_codes(weight: QuantizedTensor, codes: torch.Tensor) -> QuantizedTensor:
    anything: Any = weight
    return replace(anything, codes=codes)


class Int4PackLinear:
    """W4A16 GEMM of torch on CPU, for bf16 activations.

    It computes `(code - 8) * scale + offset`, so a zero point z becomes the offset (8 - z) * scale.
    """

    def __init__(self, weight: IntTensor, dtype: torch.dtype) -> None:
        group = weight.scheme.group_size
        self._group = weight.in_features if group == PER_CHANNEL else group
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            weight.codes.to(torch.int32), 1
        )
        scales = weight.scales.float()
        offsets = (8.0 - weight.zeros.float()) * scales
        self._scales_and_offsets = (
            torch.stack([scales, offsets], dim=-1).transpose(0, 1).contiguous().to(dtype)
        )
        self.weight_bytes = self._packed.nbytes + self._scales_and_offsets.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, self._group, self._scales_and_offsets
        )


class Int8PackLinear:
    """W8A16 GEMM of torch on CPU, for signed 8-bit weights with one scale per output channel."""

    def __init__(self, weight: IntTensor, dtype: torch.dtype) -> None:
        self._codes = (weight.codes.to(torch.int16) - 128).to(torch.int8)
        self._scales = weight.scales.flatten().to(dtype)
        self.weight_bytes = self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self._codes, self._scales)


def _refuses_packed(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if kernel_query.device != "cpu":
        return "it is a CPU kernel"
    if (reason := native_linear().reason) is not None:
        return reason
    if kernel_query.dtype not in (torch.bfloat16, torch.float32):
        return f"it takes bfloat16 and float32, not {kernel_query.dtype}"
    if kernel_query.in_features > MAX_INPUTS:
        return f"its accumulators hold at most {MAX_INPUTS} inputs"
    if isinstance(kernel_query.scheme, LookupScheme) or _has_lattice(kernel_query.scheme):
        return None
    return refuses_grid(kernel_query.scheme, kernel_query.in_features)


def _has_lattice(scheme: Scheme) -> bool:
    return isinstance(scheme, GgufScheme) and scheme.type in LATTICES


def _refuses_packed_8(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    scheme = kernel_query.scheme
    blocks = isinstance(scheme, GgufScheme) and scheme.type in WHOLE_BLOCKS + TABLE_BLOCKS
    others = isinstance(scheme, IntScheme | VectorwiseScheme | Fp4Scheme)
    if not blocks and not others and not _has_lattice(scheme):
        return f"it is for weights of whole numbers, not {scheme.label}"
    if not wants_8_bit_inputs(scheme, kernel_query.input_bits):
        return "it quantizes the activations to 8 bits, which is not asked for"
    return _refuses_packed(kernel_query)


def _refuses_cpu_bf16(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if kernel_query.device != "cpu":
        return "it is a CPU kernel"
    if kernel_query.dtype is not torch.bfloat16:
        return f"it is fast with bfloat16 activations only, not {kernel_query.dtype}"
    return None


def _refuses_int4pack(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    scheme = kernel_query.scheme
    if (reason := _refuses_cpu_bf16(kernel_query)) is not None:
        return reason
    if not isinstance(scheme, IntScheme) or scheme.activations is not None or scheme.permuted:
        return f"it is for plain integer weights, not {scheme.label}"
    if scheme.bits != 4:
        return f"it is for 4-bit weights, not {scheme.bits}"
    group = kernel_query.in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    if group not in (32, 64, 128, 256):
        return f"it has no group size {group} (32, 64, 128, 256)"
    if kernel_query.out_features % 16 or kernel_query.in_features % 64:
        shape = f"{kernel_query.out_features} × {kernel_query.in_features}"
        return f"it needs out % 16 = 0 and in % 64 = 0, not {shape}"
    return None


def _refuses_int8pack(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if (reason := _refuses_cpu_bf16(kernel_query)) is not None:
        return reason
    scheme = kernel_query.scheme
    if (
        not isinstance(scheme, IntScheme)
        or scheme.activations is not None
        or scheme.permuted
        or scheme.bits != 8
        or not scheme.symmetric
        or scheme.group_size != PER_CHANNEL
    ):
        return f"it is for symmetric int8 with one scale per channel, not {scheme.label}"
    return None


def _refuses_int8_matmul(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    scheme = kernel_query.scheme
    if kernel_query.device != "cpu":
        return "it is a CPU kernel"
    if not isinstance(scheme, IntScheme) or scheme.activations is None:
        return f"it is for int8 weights and int8 inputs, not {scheme.label}"
    inputs = scheme.activations.kind == "int8" and scheme.activations.granularity != "group128"
    whole = scheme.symmetric and scheme.group_size == PER_CHANNEL and scheme.bits == 8
    if not inputs or not whole:
        return f"it is for symmetric int8 with one scale per channel and token, not {scheme.label}"
    return None


def _refuses_vectorwise(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if kernel_query.device != "cpu":
        return "it is a CPU kernel"
    if not isinstance(kernel_query.scheme, VectorwiseScheme):
        return f"it is for LLM.int8(), not {kernel_query.scheme.label}"
    return None


def _refuses_triton(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if (reason := refuses_rows(kernel_query.device, kernel_query.dtype)) is not None:
        return reason
    return refuses_packing(kernel_query.scheme, kernel_query.in_features)


def _refuses_triton_quantized_input(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    scheme = kernel_query.scheme
    activations = scheme.activations
    if isinstance(scheme, IntScheme):
        kind = "int8" if scheme.symmetric and not scheme.permuted else None
    else:
        kind = "fp8" if isinstance(scheme, FloatScheme) else None
    if activations is None or activations.kind != kind:
        return f"it is for symmetric integers and int8 inputs, or fp8 and fp8, not {scheme.label}"
    if kind == "fp8" and (reason := refuses_fp8(kernel_query.device)) is not None:
        return reason
    if (reason := _refuses_triton(kernel_query)) is not None:
        return reason
    piece = piece_of(kernel_query.in_features, scale_group(scheme), scheme.bits)
    if piece is None or piece < 32:
        return f"an 8-bit GEMM needs groups of 32 inputs, which {scheme.label} does not fit"
    return None


def _refuses_hadamard(
    kernels: HadamardKernels, input_bits: int
) -> Callable[[QuantizedLinearKernelQuery], str | None]:
    def refuses(kernel_query: QuantizedLinearKernelQuery) -> str | None:
        scheme = kernel_query.scheme
        wants_8 = wants_8_bit_inputs(scheme, kernel_query.input_bits)
        return kernels.refuses(input_bits, kernel_query.device, kernel_query.dtype, scheme, wants_8)

    return refuses


def _refuses_triton_codes(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    return refuses_triton_codes(kernel_query.device, kernel_query.dtype, kernel_query.scheme)


def _refuses_trellis(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    return TRELLIS.refuses_scheme(kernel_query.scheme)


def _refuses_e8p(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    return E8P.refuses_scheme(kernel_query.scheme)


def _of_bits(
    kernel: Callable[[QuantizedTensor, int], LinearKernel], input_bits: int
) -> Callable[[QuantizedTensor, torch.dtype], LinearKernel]:
    return lambda weight, dtype: kernel(weight, input_bits)


def _int4pack(weight: QuantizedTensor, dtype: torch.dtype) -> LinearKernel:
    assert isinstance(weight, IntTensor)
    return Int4PackLinear(weight, dtype)


def _int8pack(weight: QuantizedTensor, dtype: torch.dtype) -> LinearKernel:
    assert isinstance(weight, IntTensor)
    return Int8PackLinear(weight, dtype)


def _triton(weight: QuantizedTensor, dtype: torch.dtype) -> LinearKernel:
    device = next(iter(weight.parts().values())).device.type
    elements = [torch.float8_e4m3fn] if refuses_fp8(device) is None else []
    tiles = pack_weight(weight, elements)
    if tiles is None:
        return TiledDequantLinear(weight, dtype)
    from .triton_linear import FloatInputLinear

    return FloatInputLinear(weight, tiles, dtype)


def _triton_quantized_input(weight: QuantizedTensor, dtype: torch.dtype) -> LinearKernel:
    tiles = pack_weight(weight, [torch.float8_e4m3fn, torch.int8])
    assert tiles is not None
    from .triton_linear import QuantizedInputLinear

    return QuantizedInputLinear(weight, tiles, dtype)


def _packed_grid(weight: QuantizedTensor) -> Grid | LatticeGrid | None:
    if isinstance(weight, GgufTensor) and _has_lattice(weight.scheme):
        return lattice_grid(weight)
    return grid_of(weight)


def _packed_8(weight: QuantizedTensor, dtype: torch.dtype) -> LinearKernel:
    grid = _packed_grid(weight)
    if grid is None:
        return TiledDequantLinear(weight, dtype)
    if isinstance(weight, VectorwiseTensor):
        assert isinstance(grid, Grid)
        return PackedOutlierLinear(weight, grid)
    return Packed8Linear(weight, grid, dtype)


def _packed_16(weight: QuantizedTensor, dtype: torch.dtype) -> LinearKernel:
    grid = weight if isinstance(weight, LookupTensor) else _packed_grid(weight)
    return (
        TiledDequantLinear(weight, dtype) if grid is None else Packed16Linear(weight, grid, dtype)
    )


def _refuses_marlin(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    return refuses_marlin(*_linear_of(kernel_query))


def _refuses_deep_gemm(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    return refuses_deep_gemm(*_linear_of(kernel_query))


def _linear_of(
    kernel_query: QuantizedLinearKernelQuery,
) -> tuple[str, torch.dtype, Scheme, int, int]:
    query = kernel_query
    return query.device, query.dtype, query.scheme, query.out_features, query.in_features


def _refuses_tiled(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    scheme = kernel_query.scheme
    if isinstance(scheme, E8pScheme):
        return "a Hadamard transform mixes all outputs of E8P codes"
    is_float8 = isinstance(scheme, FloatScheme) or (
        isinstance(scheme, Fp4Scheme) and scheme.kind == "nvfp4"
    )
    return "an Apple GPU has no float8" if kernel_query.device == "mps" and is_float8 else None


QUANTIZED_LINEAR: Operation[
    QuantizedLinearKernelQuery, Callable[[QuantizedTensor, torch.dtype], LinearKernel]
] = Operation(
    "quantized linear",
    [
        Candidate("deep-gemm", _refuses_deep_gemm, DeepGemmLinear),
        Candidate("marlin", _refuses_marlin, MarlinLinear),
        Candidate("triton-8bit-inputs", _refuses_triton_quantized_input, _triton_quantized_input),
        Candidate("triton", _refuses_triton, _triton),
        Candidate("native-8bit-inputs", _refuses_packed_8, _packed_8),
        Candidate("native-16bit-inputs", _refuses_packed, _packed_16),
        Candidate("triton-codes", _refuses_triton_codes, triton_codes),
        *(
            Candidate(name, _refuses_hadamard(kernels, input_bits), _of_bits(kernel, input_bits))
            for name, kernels, kernel, input_bits in (
                ("trellis-8bit-inputs", TRELLIS, NativeTrellisLinear, 8),
                ("trellis-16bit-inputs", TRELLIS, NativeTrellisLinear, 16),
                ("native-trellis", TRELLIS, NativeTrellisLinear, FLOAT_BITS),
                ("e8p-8bit-inputs", E8P, NativeE8pLinear, 8),
                ("e8p-16bit-inputs", E8P, NativeE8pLinear, 16),
                ("native-e8p", E8P, NativeE8pLinear, FLOAT_BITS),
            )
        ),
        Candidate("torch-trellis", _refuses_trellis, TransformedLinear),
        Candidate("torch-e8p", _refuses_e8p, E8pLinear),
        Candidate("torch-int4pack", _refuses_int4pack, _int4pack),
        Candidate("torch-int8pack", _refuses_int8pack, _int8pack),
        Candidate("torch-int8-product", _refuses_int8_matmul, Int8MatmulLinear),
        Candidate("torch-int8-outliers", _refuses_vectorwise, VectorwiseLinear),
        Candidate("tiled-dequant", _refuses_tiled, TiledDequantLinear),
    ],
)


def prepare_quantized_linear(
    weight: QuantizedTensor, dtype: torch.dtype, input_bits: int = 16
) -> LinearKernel:
    """Repack `weight` for the best kernel that supports activations of `dtype`.

    With `input_bits` 8 the kernel may quantize them to 8 bits where the scheme keeps 16.

    Raises:
        BadInput: the device has no kernel for the scheme.
    """
    kernel_query = QuantizedLinearKernelQuery(
        next(iter(weight.parts().values())).device.type,
        dtype,
        weight.out_features,
        weight.in_features,
        weight.scheme,
        input_bits,
    )
    try:
        chosen = QUANTIZED_LINEAR.select(
            kernel_query, lambda: linear_trial(weight, dtype, input_bits)
        )
        return chosen.run(weight, dtype)
    except NoKernel as error:
        raise BadInput(str(error)) from error
