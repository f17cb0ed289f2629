"""ggml's blocks of every type: quantization, dequantization, codes as bytes (in C if it compiles); tensors.

Exact equivalents: symmetric integers in groups of 32 are Q4_0 and Q8_0, and MXFP4 is MXFP4, but that ggml's
table is e2m1 doubled, beside half the power, and its nibbles are 16 weights apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ....base.build import beside, fields
from ....base.errors import BadInput
from ...base.device import rows_at_once
from ..base.tensor import QuantizedTensor, edges, require_finite
from ..fp4.kind import Fp4Tensor
from ..fp4.scheme import Fp4Scheme
from ..integer.kind import IntTensor
from ..integer.scheme import IntScheme
from .fit import native_search
from .k_blocks import affine_fields, dequantize_k, q2_fields, q3_fields, quantize_k, signed_fields
from .lattice import LATTICES, dequantize_lattice, quantize_lattice
from .scheme import GGUF_BLOCKS, GgufScheme
from .small_blocks import (
    WIDTH,
    dequantize_iq4_nl,
    dequantize_iq4_xs,
    dequantize_mxfp4,
    dequantize_simple,
    pack_codes,
    quantize_simple,
    quantize_table,
    read_half,
    simple_codes,
    table_codes,
)

# Weights per chunk: the search's temporaries stay in the processor's cache.
_CHUNK_WEIGHTS = 2**17
# The search in C keeps a block in registers, and wakes its threads at every call.
_SEARCHED_WEIGHTS = 2**20
_LARGEST = torch.finfo(torch.float16).max


def quantize_blocks(
    weight: torch.Tensor,
    type_name: str,
    importance: torch.Tensor | None = None,
    *,
    name: str = "weight",
) -> torch.Tensor:
    """Quantize a weight `[out, in]` to blocks along its rows, uint8 `[out, row bytes]`, by `importance`
    `[in]`. Raises BadInput: NaN, infinite or too large weights, or rows that are no whole blocks."""
    out_features, in_features = weight.shape
    width, block_bytes = GGUF_BLOCKS[type_name]
    if in_features % width:
        raise BadInput(f"{name}: {type_name} has blocks of {width}, which {in_features} is not in")
    if type_name.endswith("_K"):
        quantize = quantize_k
    elif type_name in LATTICES:
        quantize = quantize_lattice
    else:
        quantize = quantize_table if type_name in _TABLES else quantize_simple
    in_c = type_name.endswith("_K") and native_search().library is not None
    chunk = _SEARCHED_WEIGHTS if in_c else _CHUNK_WEIGHTS
    at_once = rows_at_once(weight.device, chunk, in_features)
    per_row = None
    if importance is not None and (mean := float(importance.to(torch.float32).mean())) > 0:
        # Bounded away from 0, so that channels which are never active keep good codes.
        per_row = (importance.to(torch.float32) / mean).clamp(min=1e-4)
    packed = torch.empty(
        out_features, in_features // width * block_bytes, dtype=torch.uint8, device=weight.device
    )
    for begin in range(0, out_features, at_once):
        rows = weight[begin : begin + at_once].to(torch.float32).contiguous()
        low, high = edges(rows)
        if not (low >= -_LARGEST and high <= _LARGEST):
            require_finite(rows, name)
            raise BadInput(f"{name} holds values too large for the float16 scales of {type_name}")
        spread = None if per_row is None else per_row.expand_as(rows).reshape(-1, width)
        blocks = quantize(rows.view(-1, width), type_name, spread)
        packed[begin : begin + at_once] = blocks.view(rows.shape[0], -1)
    return packed


def dequantize_blocks(data: torch.Tensor, type_name: str) -> torch.Tensor:
    blocks = data.reshape(-1, GGUF_BLOCKS[type_name][1])
    if type_name in _TABLES:
        weights = _TABLES[type_name](blocks)
    elif type_name in LATTICES:
        weights = dequantize_lattice(blocks, type_name)
    else:
        dequantize = dequantize_k if type_name.endswith("_K") else dequantize_simple
        weights = dequantize(blocks, type_name)
    return weights.view(data.shape[0], -1)


_TABLES = {"IQ4_NL": dequantize_iq4_nl, "IQ4_XS": dequantize_iq4_xs, "MXFP4": dequantize_mxfp4}

RUN = 32
LAYOUTS: dict[str, tuple[int, int]] = {
    "Q4_0": (0, 2),
    "Q4_1": (0, 4),
    "IQ4_NL": (0, 2),
    "IQ4_XS": (0, 8),
    "MXFP4": (0, 1),
    "Q5_0": (1, 6),
    "Q5_1": (1, 8),
    "Q8_0": (2, 2),
    "Q4_K": (3, 16),
    "Q5_K": (4, 48),
    "Q6_K": (5, 0),
    "Q2_K": (6, 16),
    "Q3_K": (7, 32),
}
"""The layout in `codes.h`, and the byte of a block where the low bits of its codes begin."""


class Blocks(ctypes.Structure):
    """`Blocks` of `codes.h`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("size", "runs", "layout", "at")]


class _CodesCall(ctypes.Structure):
    """`CodesCall` of `codes.c`."""

    _fields_ = [
        *fields(pointers="data codes"),
        ("blocks", Blocks),
        *fields(numbers="count threads"),
        ("next", ctypes.c_long),
    ]


def blocks_of(kind: str) -> Blocks:
    width, size = GGUF_BLOCKS[kind]
    return Blocks(size, width // RUN, *LAYOUTS[kind])


native_codes = beside(__file__, "codes.c")
"""The compiled unpacking, or the reason why there is none."""


def block_codes(data: torch.Tensor, kind: str) -> torch.Tensor:
    """The codes of blocks `[n, bytes]` of a type, uint8 `[n, width]`; signed ones (Q8_0) plus 128."""
    library = native_codes().library if data.device.type == "cpu" else None
    if library is None:
        return block_codes_torch(data, kind)
    data = data.contiguous()
    blocks, count = blocks_of(kind), len(data)
    codes = torch.empty(count, blocks.runs * RUN, dtype=torch.uint8)
    pointers = data.data_ptr(), codes.data_ptr()
    call = _CodesCall(*pointers, blocks, count, torch.get_num_threads())
    library.llmopt_codes(ctypes.byref(call))
    return codes


def block_codes_torch(data: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "Q8_0":
        return data[:, 2:] ^ 128
    if kind in ("IQ4_NL", "IQ4_XS", "MXFP4"):
        return table_codes(data, LAYOUTS[kind][1])
    if not kind.endswith("_K"):
        return simple_codes(data, kind)
    fields = {"Q2_K": q2_fields, "Q3_K": q3_fields, "Q6_K": signed_fields}
    codes = fields[kind](data)[0] if kind in fields else affine_fields(data, int(kind[1]))[0]
    return codes.flatten(1)


INTEGER_TYPES = ("Q4_0", "Q8_0")
_NEGATIVE_ZERO = 8


@dataclass(frozen=True, slots=True)
class GgufTensor(QuantizedTensor):
    """Rows of blocks, one after another: uint8 `[out, row bytes]`; ValueError for rows that are none."""

    by_row: ClassVar[tuple[str, ...]] = ("data",)

    data: torch.Tensor
    scheme: GgufScheme

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.shape[1] % self.scheme.block[1]:
            raise ValueError(
                f"{self.scheme.type} rows are bytes in blocks of {self.scheme.block[1]}, not "
                f"{self.data.dtype} {tuple(self.data.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        width, block_bytes = self.scheme.block
        return self.data.shape[0], self.data.shape[1] // block_bytes * width

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return dequantize_blocks(self.data, self.scheme.type).to(dtype)

    def forms(self) -> Iterator[QuantizedTensor]:
        yield self
        if self.scheme.type in INTEGER_TYPES:
            plain = gguf_to_int(self)
            # ggml writes a scale of 0 for a group of zeros, which other readers reject.
            dead = plain.scales == 0
            members = dead.repeat_interleave(WIDTH, dim=1)
            codes = plain.codes.masked_fill(members, plain.scheme.middle)
            yield from replace(plain, codes=codes, scales=plain.scales.masked_fill(dead, 1)).forms()
        elif self.scheme.type == "MXFP4":
            yield from gguf_to_fp4(self).forms()


def as_blocks(tensor: QuantizedTensor) -> GgufTensor:
    """The same weight in ggml's blocks, of a scheme that has a `ggml_type`."""
    if isinstance(tensor, IntTensor):
        return int_to_gguf(tensor)
    if isinstance(tensor, Fp4Tensor):
        return fp4_to_gguf(tensor)
    assert isinstance(tensor, GgufTensor)
    return tensor


def int_to_gguf(tensor: IntTensor) -> GgufTensor:
    """The same weight as Q4_0 or Q8_0, with its float16 scales repeated."""
    type_name = tensor.scheme.ggml_type
    assert type_name is not None and tensor.scales.dtype == torch.float16
    num_blocks = tensor.in_features // WIDTH
    head = tensor.scales.repeat_interleave(num_blocks // tensor.num_groups, dim=1).flatten()
    codes = tensor.codes.reshape(-1, WIDTH)
    # Q8_0: code - 128, in two's complement.
    values = codes ^ 128 if type_name == "Q8_0" else pack_codes(codes)
    blocks = torch.cat([head.unsqueeze(-1).view(torch.uint8), values], dim=-1)
    return GgufTensor(blocks.view(tensor.out_features, -1), GgufScheme(type_name))


def gguf_to_int(tensor: GgufTensor) -> IntTensor:
    """A Q4_0 or Q8_0 weight as integers in groups of 32; no other type has integer zeros."""
    blocks = tensor.data.reshape(-1, tensor.scheme.block[1])
    codes = blocks[:, 2:] ^ 128 if tensor.scheme.bits == 8 else simple_codes(blocks, "Q4_0")
    out_features, in_features = tensor.shape
    scheme = IntScheme(tensor.scheme.bits, WIDTH, symmetric=True)
    scales = read_half(blocks, 0).to(torch.float16).view(out_features, -1)
    return IntTensor(
        codes=codes.reshape(out_features, in_features),
        scales=scales,
        zeros=torch.full_like(scales, scheme.middle, dtype=torch.uint8),
        scheme=scheme,
    )


def fp4_to_gguf(tensor: Fp4Tensor) -> GgufTensor:
    """The same weight in blocks, which have no negative zero; `tensor` is MXFP4."""
    width = tensor.scheme.block_size
    codes = tensor.codes.masked_fill(tensor.codes == _NEGATIVE_ZERO, 0).reshape(-1, width)
    blocks = torch.cat([tensor.scales.reshape(-1, 1), pack_codes(codes)], dim=-1)
    return GgufTensor(blocks.view(tensor.out_features, -1), GgufScheme("MXFP4"))


def gguf_to_fp4(tensor: GgufTensor) -> Fp4Tensor:
    """The codes and exponents of MXFP4 blocks."""
    blocks = tensor.data.reshape(-1, tensor.scheme.block[1])
    return Fp4Tensor(
        table_codes(blocks, 1).view(tensor.shape),
        blocks[:, 0].reshape(tensor.out_features, -1).contiguous(),
        Fp4Scheme("mxfp4"),
    )
