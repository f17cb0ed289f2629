"""When Triton's kernels for trellis and E8P codes can serve, and how the dispatch table makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....quant.base.errors import BadInput
from ....quant.base.scheme import PER_CHANNEL, Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.e8p.scheme import E8pScheme
from ....quant.kinds.fp4.scheme import Fp4Scheme
from ....quant.kinds.fp8.scheme import FloatScheme
from ....quant.kinds.ggml.lattice import LATTICES
from ....quant.kinds.ggml.scheme import GgufScheme
from ....quant.kinds.ggml.tensor import GgufTensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.integer.scheme import IntScheme
from ....quant.kinds.lookup.kind import LookupTensor
from ....quant.kinds.lookup.scheme import LookupScheme
from ....quant.kinds.trellis.scheme import TrellisScheme
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ....quant.kinds.vectorwise.scheme import VectorwiseScheme
from ..common.devices import refuses_cpu, refuses_fp8, refuses_native, refuses_rows
from ..common.dispatch import Candidate, NoKernel, Operation
from ..common.verdicts import RandomInputs, Trial, tolerance
from .grid import TABLE_BLOCKS, WHOLE_BLOCKS, Grid, LatticeGrid, grid_of, lattice_grid, refuses_grid
from .hadamard_linear import (
    E8P,
    FLOAT_BITS,
    TRELLIS,
    E8pLinear,
    HadamardKernels,
    NativeE8pLinear,
    NativeTrellisLinear,
    TransformedLinear,
)
from .library_linear import DeepGemmLinear, MarlinLinear, refuses_deep_gemm, refuses_marlin
from .linear import LinearKernel
from .native_linear import (
    Packed8Linear,
    Packed16Linear,
    PackedOutlierLinear,
    native_linear,
    wants_8_bit_inputs,
)
from .torch_linear import (
    Int4PackLinear,
    Int8MatmulLinear,
    Int8PackLinear,
    TiledDequantLinear,
    VectorwiseLinear,
)
from .triton_packed_weight import pack_weight, piece_of, refuses_packing, scale_group

if TYPE_CHECKING:
    from .triton_hadamard import TritonTransformedLinear


def triton_codes(weight: QuantizedTensor, dtype: torch.dtype) -> TritonTransformedLinear:
    """A `TritonTransformedLinear`; Triton is imported where it is made."""
    from .triton_hadamard import TritonTransformedLinear

    return TritonTransformedLinear(weight, dtype)


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


def _refuses_packed(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if (reason := refuses_native(kernel_query, native_linear)) is not None:
        return reason
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
    if (reason := refuses_cpu(kernel_query.device)) is not None:
        return reason
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
    if (reason := refuses_cpu(kernel_query.device)) is not None:
        return reason
    if not isinstance(scheme, IntScheme) or scheme.activations is None:
        return f"it is for int8 weights and int8 inputs, not {scheme.label}"
    inputs = scheme.activations.kind == "int8" and scheme.activations.granularity != "group128"
    whole = scheme.symmetric and scheme.group_size == PER_CHANNEL and scheme.bits == 8
    if not inputs or not whole:
        return f"it is for symmetric int8 with one scale per channel and token, not {scheme.label}"
    return None


def _refuses_vectorwise(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if (reason := refuses_cpu(kernel_query.device)) is not None:
        return reason
    if not isinstance(kernel_query.scheme, VectorwiseScheme):
        return f"it is for LLM.int8(), not {kernel_query.scheme.label}"
    return None


def _refuses_triton(kernel_query: QuantizedLinearKernelQuery) -> str | None:
    if (reason := refuses_rows(kernel_query)) is not None:
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
    if not isinstance(kernel_query.scheme, TrellisScheme | E8pScheme):
        return f"it is for trellis and E8P codes, not {kernel_query.scheme.label}"
    return refuses_rows(kernel_query)


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


COMPARED_TOKENS = (1, 20, 100)
"""A GEMV, a small GEMM, and the prefill path."""
TIMED_TOKENS = (1, 16, 64)

Prepare = Callable[[QuantizedTensor, torch.dtype], LinearKernel]


def linear_trial(weight: QuantizedTensor, dtype: torch.dtype, input_bits: int) -> Trial[Prepare]:
    """The GEMM of one weight."""
    random = RandomInputs(next(iter(weight.parts().values())).device, dtype)
    inputs = weight.in_features
    compared = [random(count, inputs) for count in COMPARED_TOKENS]
    timed = [random(count, inputs) for count in TIMED_TOKENS]

    def compute(prepare: Prepare) -> list[torch.Tensor]:
        kernel = prepare(weight, dtype)
        return [kernel(x) for x in compared]

    def calls(prepare: Prepare) -> Sequence[Callable[[], object]]:
        kernel = prepare(weight, dtype)
        return [lambda x=x: kernel(x) for x in timed]

    quantizes = input_bits == 8 or weight.scheme.activations is not None
    return Trial(compute, tolerance(dtype, quantizes_inputs=quantizes), calls)


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
