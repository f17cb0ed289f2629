"""Lossless conversion between symmetric integer weights and ggml's Q4_0 and Q8_0 blocks."""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, Scheme
from ..ggml.simple_blocks import WIDTH, read_half, simple_codes
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.ggml.scheme import GgufScheme
from ..kinds.integer.scheme import IntScheme
from ..tensors.gguf import GgufTensor
from ..tensors.integer import IntTensor

_TYPE_OF_BITS = {4: "Q4_0", 8: "Q8_0"}


def block_type_of(scheme: Scheme) -> str | None:
    """The block type that stores this scheme losslessly; None: there is none."""
    if isinstance(scheme, GgufScheme):
        return scheme.type
    if scheme == Fp4Scheme("mxfp4"):
        return "MXFP4"
    if (
        not isinstance(scheme, IntScheme)
        or not scheme.symmetric
        or scheme.permuted
        or scheme.activations is not None
        or (scheme.group_size != PER_CHANNEL and scheme.group_size % WIDTH)
    ):
        return None
    return _TYPE_OF_BITS.get(scheme.bits)


def int_to_gguf(tensor: IntTensor, *, name: str = "weight") -> GgufTensor:
    """The same weight as Q4_0 or Q8_0: scales of larger groups are repeated per block of 32.

    Raises:
        BadInput: another scheme, a width that 32 does not divide, or scales that float16 cannot hold.
    """
    type_name = block_type_of(tensor.scheme)
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
    if tensor.scheme.type not in _TYPE_OF_BITS.values():
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
