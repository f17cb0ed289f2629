"""Weights in ggml's quantization blocks, with the bytes of a GGUF file, and their exact equivalents.

Symmetric integers in groups of 32 are Q4_0 and Q8_0. MXFP4 is MXFP4: both have e2m1 codes and an exponent of
two, biased by 127, for every 32 weights; ggml's table is that of e2m1 doubled, beside half the power, and its
nibbles are 16 weights apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...base.errors import BadInput
from ..base.tensor import QuantizedTensor
from ..fp4.kind import Fp4Tensor
from ..fp4.scheme import Fp4Scheme
from ..integer.kind import IntTensor
from ..integer.scheme import IntScheme
from .blocks import dequantize_blocks
from .scheme import GgufScheme
from .small_blocks import WIDTH, pack_codes, read_half, simple_codes, table_codes

INTEGER_TYPES = ("Q4_0", "Q8_0")
_NEGATIVE_ZERO = 8


@dataclass(frozen=True, slots=True)
class GgufTensor(QuantizedTensor):
    """Rows of blocks.

    Attributes:
        data: uint8 `[out, row bytes]`, whole blocks one after another.
        scheme: which block type.

    Raises:
        ValueError: rows that are no whole blocks.
    """

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
        """`(out_features, in_features)`."""
        width, block_bytes = self.scheme.block
        return self.data.shape[0], self.data.shape[1] // block_bytes * width

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantized weight `[out, in]`, bit-identical to ggml's dequantization."""
        return dequantize_blocks(self.data, self.scheme.type).to(dtype)

    def forms(self) -> Iterator[QuantizedTensor]:
        yield self
        if self.scheme.type in INTEGER_TYPES:
            yield from _without_zero_scales(gguf_to_int(self)).forms()
        elif self.scheme.type == "MXFP4":
            yield from gguf_to_fp4(self).forms()


def as_blocks(module: str, tensor: QuantizedTensor) -> GgufTensor:
    """The same weight in ggml's blocks.

    Raises:
        BadInput: no block type holds it without loss.
    """
    if isinstance(tensor, IntTensor):
        return int_to_gguf(tensor, name=module)
    if isinstance(tensor, Fp4Tensor) and tensor.scheme.ggml_type is not None:
        return fp4_to_gguf(tensor)
    if not isinstance(tensor, GgufTensor):
        raise BadInput(f"{module}: format gguf cannot hold {tensor.scheme.label} weights")
    return tensor


def int_to_gguf(tensor: IntTensor, *, name: str = "weight") -> GgufTensor:
    """The same weight as Q4_0 or Q8_0: scales of larger groups are repeated per block of 32.

    Raises:
        BadInput: another scheme, a width that 32 does not divide, or scales that float16 cannot hold.
    """
    type_name = tensor.scheme.ggml_type
    if type_name is None:
        raise BadInput(
            f"{name}: {tensor.scheme.label} weights fit no GGUF type without loss; 4- and 8-bit "
            f"symmetric ones in groups of a multiple of {WIDTH} do"
        )
    if tensor.in_features % WIDTH:
        raise BadInput(f"{name}: {tensor.in_features} inputs are no multiple of {WIDTH}")
    scales = tensor.scales.to(torch.float16)
    if not torch.equal(scales.to(torch.float32), tensor.scales.to(torch.float32)):
        raise BadInput(
            f"{name}: its {tensor.scales.dtype} scales are not exact in GGUF's float16; quantize the "
            f"original model to {type_name} instead"
        )
    num_blocks = tensor.in_features // WIDTH
    head = scales.repeat_interleave(num_blocks // tensor.num_groups, dim=1).flatten()
    codes = tensor.codes.reshape(-1, WIDTH)
    if type_name == "Q8_0":
        values = codes ^ 128  # code - 128, in two's complement
    else:
        values = codes[:, :16] | (codes[:, 16:] << 4)
    blocks = torch.cat([head.unsqueeze(-1).view(torch.uint8), values], dim=-1)
    return GgufTensor(blocks.view(tensor.out_features, -1), GgufScheme(type_name))


def gguf_to_int(tensor: GgufTensor, *, name: str = "weight") -> IntTensor:
    """A Q4_0 or Q8_0 weight as integer codes in groups of 32 with float16 scales; Q4_0's may be negative.

    Raises:
        BadInput: another block type; it has no integer zero points.
    """
    if tensor.scheme.type not in INTEGER_TYPES:
        raise BadInput(
            f"{name}: {tensor.scheme.type} blocks are no integer grid with one scale for a group; "
            "Q4_0 and Q8_0 are"
        )
    blocks = tensor.data.reshape(-1, tensor.scheme.block[1])
    codes = blocks[:, 2:] ^ 128 if tensor.scheme.bits == 8 else simple_codes(blocks, "Q4_0")
    out_features, in_features = tensor.shape
    scheme = IntScheme(tensor.scheme.bits, WIDTH, symmetric=True)
    scales = read_half(blocks, 0).to(torch.float16).view(out_features, -1)
    return IntTensor(
        codes=codes.reshape(out_features, in_features),
        scales=scales,
        zeros=torch.full(scales.shape, scheme.middle, dtype=torch.uint8),
        scheme=scheme,
    )


def _without_zero_scales(tensor: IntTensor) -> IntTensor:
    """All-zero groups as zero codes: ggml writes a scale of 0, which other readers reject."""
    dead = tensor.scales == 0
    members = dead.repeat_interleave(tensor.in_features // tensor.num_groups, dim=1)
    return replace(
        tensor,
        codes=tensor.codes.masked_fill(members, tensor.scheme.middle),
        scales=tensor.scales.masked_fill(dead, 1),
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
