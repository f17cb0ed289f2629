"""Quantized linears: dispatch over GEMM kernels for packed weights, `y = x @ ((codes - zeros) * scales).T`.

The weight is repacked once at load. No kernel keeps a floating-point copy: the fallback dequantizes a tile at
a time. On a GPU the kernels are tried on the weight itself, with few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from ....base.errors import BadInput
from ....quant.base.scheme import PER_CHANNEL, Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ..common.devices import (
    CPU_DTYPES,
    refuses_cpu,
    refuses_device,
    refuses_fp8,
    refuses_native,
    refuses_rows,
    serves_all,
)
from ..common.dispatch import Candidate, NoKernel, Operation, lazily
from ..common.verdicts import RandomInputs, Trial, tolerance
from .grid import CodeGrid, has_whole_codes, native_grid_of, refuses_native_grid
from .hadamard_linear import (
    FLOAT_BITS,
    NativeTrellisLinear,
    TransformedLinear,
    native_trellis,
    native_trellis_integer,
)
from .library_linear import (
    DEEP_GEMM_WEIGHTS,
    MARLIN_GPUS,
    MARLIN_WEIGHTS,
    DeepGemmLinear,
    Int4PackLinear,
    Int8MatmulLinear,
    Int8PackLinear,
    MarlinLinear,
    TiledDequantLinear,
    VectorwiseLinear,
    refuses_deep_gemm,
    refuses_dtype,
    refuses_marlin,
)
from .linear import LinearKernel
from .native_linear import (
    Packed8Linear,
    Packed16Linear,
    PackedOutlierLinear,
    native_linear,
    wants_8_bit_inputs,
)
from .triton_packed_weight import pack_weight, piece_of, refuses_packing

if TYPE_CHECKING:
    from ....quant.kinds.fp8.scheme import FloatScheme
    from ....quant.kinds.integer.scheme import IntScheme
    from ....quant.kinds.trellis.scheme import TrellisScheme

MAX_INPUTS = 2**20


@dataclass(frozen=True, slots=True)
class QuantizedLinearKernelQuery:
    """Kernel query of a quantized linear: device, dtype, shape, scheme. `dtype` is the activations'; with
    `input_bits` 8 a kernel may quantize them where the scheme does not ask for it."""

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


Refusal = Callable[[QuantizedLinearKernelQuery], str | None]
Prepare = Callable[[QuantizedTensor, torch.dtype], LinearKernel]
LinearCandidate = Candidate[QuantizedLinearKernelQuery, Prepare]


def _for_kinds(
    name: str,
    prepare: Prepare,
    kinds: Collection[str],
    weights: str,
    rest: Refusal = serves_all,
    first: Refusal = serves_all,
) -> LinearCandidate:
    """Candidate for kinds that `weights` describes; `first` refuses before the kind's check, `rest` after."""

    def refuses(query: QuantizedLinearKernelQuery) -> str | None:
        if (reason := first(query)) is not None:
            return reason
        if query.scheme.kind_name not in kinds:
            return f"it is for {weights}, not {query.scheme.label}"
        return rest(query)

    return Candidate(name, refuses, prepare)


_PLAIN, _INT8 = "plain integer weights", "symmetric int8 with one scale per channel"


def _refuses_device(query: QuantizedLinearKernelQuery) -> str | None:
    return refuses_cpu(query.device)


def _refuses_bf16(query: QuantizedLinearKernelQuery) -> str | None:
    is_fast = query.dtype is torch.bfloat16
    reason = None if is_fast else f"it is fast with bfloat16 activations only, not {query.dtype}"
    return refuses_cpu(query.device) or reason


def _refuses_packed(query: QuantizedLinearKernelQuery) -> str | None:
    if (reason := refuses_native(query, native_linear)) is not None:
        return reason
    if query.in_features > MAX_INPUTS:
        return f"its accumulators hold at most {MAX_INPUTS} inputs"
    return refuses_native_grid(query.scheme, query.in_features)


def _refuses_packed_8(query: QuantizedLinearKernelQuery) -> str | None:
    if not has_whole_codes(query.scheme):
        return f"it is for weights of whole numbers, not {query.scheme.label}"
    if not wants_8_bit_inputs(query.scheme, query.input_bits):
        return "it quantizes the activations to 8 bits, which is not asked for"
    return _refuses_packed(query)


def _refuses_int4pack(query: QuantizedLinearKernelQuery) -> str | None:
    scheme = cast("IntScheme", query.scheme)
    if scheme.activations is not None or scheme.permuted:
        return f"it is for {_PLAIN}, not {scheme.label}"
    if scheme.bits != 4:
        return f"it is for 4-bit weights, not {scheme.bits}"
    group = scheme.scale_group or query.in_features
    if group not in (32, 64, 128, 256):
        return f"it has no group size {group} (32, 64, 128, 256)"
    if query.out_features % 16 or query.in_features % 64:
        shape = f"{query.out_features} × {query.in_features}"
        return f"it needs out % 16 = 0 and in % 64 = 0, not {shape}"
    return None


def _is_plain_int8(scheme: IntScheme) -> bool:
    return scheme.symmetric and scheme.group_size == PER_CHANNEL and scheme.bits == 8


def _refuses_int8pack(query: QuantizedLinearKernelQuery) -> str | None:
    scheme = cast("IntScheme", query.scheme)
    if scheme.activations is not None or scheme.permuted or not _is_plain_int8(scheme):
        return f"it is for {_INT8}, not {scheme.label}"
    return None


def _refuses_int8_matmul(query: QuantizedLinearKernelQuery) -> str | None:
    scheme, activations = cast("IntScheme", query.scheme), query.scheme.activations
    if activations is None:
        return f"it is for int8 weights and int8 inputs, not {scheme.label}"
    inputs = activations.kind == "int8" and activations.granularity != "group128"
    if not inputs or not _is_plain_int8(scheme):
        return f"it is for symmetric int8 with one scale per channel and token, not {scheme.label}"
    return None


def _refuses_triton(query: QuantizedLinearKernelQuery) -> str | None:
    return refuses_rows(query) or refuses_packing(query.scheme, query.in_features)


QUANTIZED_INPUTS = {"int": "int8", "float": "fp8"}
"""Kinds that multiply inputs of their own kind in Triton, and that kind."""
_QUANTIZED_INPUTS = "symmetric integers and int8 inputs, or fp8 and fp8"


def _refuses_triton_quantized_input(query: QuantizedLinearKernelQuery) -> str | None:
    scheme, activations = query.scheme, query.scheme.activations
    kind = None if scheme.asymmetric or scheme.permuted else QUANTIZED_INPUTS[scheme.kind_name]
    if activations is None or activations.kind != kind:
        return f"it is for {_QUANTIZED_INPUTS}, not {scheme.label}"
    if kind == "fp8" and (reason := refuses_fp8(query.device)) is not None:
        return reason
    if (reason := _refuses_triton(query)) is not None:
        return reason
    piece = piece_of(query.in_features, scheme.scale_group, scheme.bits)
    if piece is None or piece < 32:
        return f"an 8-bit GEMM needs groups of 32 inputs, which {scheme.label} does not fit"
    return None


def _refuses_tiled(query: QuantizedLinearKernelQuery) -> str | None:
    if query.scheme.kind_name == "e8p":
        return "a Hadamard transform mixes all outputs of E8P codes"
    has_no_float8 = query.device == "mps" and query.scheme.has_float8
    return "an Apple GPU has no float8" if has_no_float8 else None


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


def _packed(weight: QuantizedTensor, dtype: torch.dtype, input_bits: int) -> LinearKernel:
    grid = native_grid_of(weight)
    if grid is None:
        return TiledDequantLinear(weight, dtype)
    if input_bits == 16:
        return Packed16Linear(weight, grid, dtype)
    if isinstance(weight, VectorwiseTensor):
        assert isinstance(grid, CodeGrid)
        return PackedOutlierLinear(weight, grid)
    return Packed8Linear(weight, grid, dtype)


def _native_trellis(name: str, input_bits: int) -> LinearCandidate:
    """The C kernel with inputs of so many bits, 8 only if asked for."""

    def rest(query: QuantizedLinearKernelQuery) -> str | None:
        scheme = cast("TrellisScheme", query.scheme)
        if query.dtype not in CPU_DTYPES:
            return f"it takes bfloat16 and float32, not {query.dtype}"
        if input_bits == FLOAT_BITS:
            return native_trellis().reason
        if input_bits == 8 and scheme.codebook != "mul1":
            return f"it adds up the bytes of codebook mul1, which is not that of {scheme.label}"
        if input_bits == 8 and not wants_8_bit_inputs(scheme, query.input_bits):
            return "it quantizes the activations to 8 bits, which is not asked for"
        if input_bits == 16 and query.dtype is torch.float32:
            return "it quantizes the activations, to fewer bits than float32 has"
        return native_trellis_integer().reason

    def prepare(weight: QuantizedTensor, _: torch.dtype) -> LinearKernel:
        return NativeTrellisLinear(weight, input_bits)

    return _for_kinds(name, prepare, ("trellis",), "trellis codes", rest, _refuses_device)


TRITON_CODES = lazily("linear.triton_hadamard", "TritonTransformedLinear")

QUANTIZED_LINEAR: Operation[QuantizedLinearKernelQuery, Prepare] = Operation(
    "quantized linear",
    [
        _for_kinds(
            "deep-gemm",
            DeepGemmLinear,
            ("float",),
            DEEP_GEMM_WEIGHTS,
            lambda q: refuses_deep_gemm(
                cast("FloatScheme", q.scheme), q.out_features, q.in_features
            ),
            lambda q: refuses_dtype(q.device, q.dtype),
        ),
        _for_kinds(
            "marlin",
            MarlinLinear,
            ("int",),
            MARLIN_WEIGHTS,
            lambda q: refuses_marlin(cast("IntScheme", q.scheme), q.out_features, q.in_features),
            lambda q: refuses_device(q.device, MARLIN_GPUS, q.dtype),
        ),
        _for_kinds(
            *("triton-8bit-inputs", _triton_quantized_input, QUANTIZED_INPUTS, _QUANTIZED_INPUTS),
            _refuses_triton_quantized_input,
        ),
        Candidate("triton", _refuses_triton, _triton),
        Candidate("native-8bit-inputs", _refuses_packed_8, partial(_packed, input_bits=8)),
        Candidate("native-16bit-inputs", _refuses_packed, partial(_packed, input_bits=16)),
        _for_kinds("triton-codes", TRITON_CODES, ("trellis",), "trellis codes", refuses_rows),
        _native_trellis("trellis-8bit-inputs", 8),
        _native_trellis("trellis-16bit-inputs", 16),
        _native_trellis("native-trellis", FLOAT_BITS),
        _for_kinds("torch-trellis", TransformedLinear, ("trellis",), "trellis codes"),
        _for_kinds("torch-e8p", TransformedLinear, ("e8p",), "E8P codes"),
        _for_kinds(
            "torch-int4pack", Int4PackLinear, ("int",), _PLAIN, _refuses_int4pack, _refuses_bf16
        ),
        _for_kinds(
            "torch-int8pack", Int8PackLinear, ("int",), _INT8, _refuses_int8pack, _refuses_bf16
        ),
        _for_kinds(
            *("torch-int8-product", Int8MatmulLinear, ("int",), "int8 weights and int8 inputs"),
            *(_refuses_int8_matmul, _refuses_device),
        ),
        _for_kinds(
            *("torch-int8-outliers", VectorwiseLinear, ("vectorwise",), "LLM.int8()"),
            first=_refuses_device,
        ),
        Candidate("tiled-dequant", _refuses_tiled, TiledDequantLinear),
    ],
)
"""The kernels, each with its kinds, or those of `GRIDS`; the last, the reference, serves all."""

COMPARED_TOKENS = (1, 20, 100)
"""A GEMV, a small GEMM, and the prefill path."""
TIMED_TOKENS = (1, 16, 64)


def linear_trial(
    weight: QuantizedTensor,
    dtype: torch.dtype,
    input_bits: int,
    tokens: Sequence[int] = COMPARED_TOKENS,
) -> Trial[Prepare]:
    random = RandomInputs(next(iter(weight.parts().values())).device, dtype)
    inputs = weight.in_features
    compared = [random(count, inputs) for count in tokens]
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
    """Repack `weight` for the best kernel; `input_bits` 8 allows int8 inputs. BadInput: there is none."""
    device = next(iter(weight.parts().values())).device.type
    shape = weight.out_features, weight.in_features
    query = QuantizedLinearKernelQuery(device, dtype, *shape, weight.scheme, input_bits)
    try:
        chosen = QUANTIZED_LINEAR.select(query, lambda: linear_trial(weight, dtype, input_bits))
        return chosen.run(weight, dtype)
    except NoKernel as error:
        raise BadInput(str(error)) from error
