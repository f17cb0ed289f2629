"""Lossless conversion between MXFP4 weights and ggml's MXFP4 blocks.

Both have e2m1 codes and an exponent of two, biased by 127, for every 32 weights. ggml's table is that of
e2m1 doubled, beside half the power, and its nibbles are 16 weights apart.
"""

from __future__ import annotations

import torch

from ..ggml.table_blocks import pack_codes, table_codes
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.ggml.scheme import GgufScheme
from ..tensors.fp4 import Fp4Tensor
from ..tensors.gguf import GgufTensor

TYPE = "MXFP4"
_NEGATIVE_ZERO = 8


def fp4_to_gguf(tensor: Fp4Tensor) -> GgufTensor:
    """The same weight in blocks, which have no negative zero; `tensor` is MXFP4."""
    width = tensor.scheme.block_size
    codes = tensor.codes.masked_fill(tensor.codes == _NEGATIVE_ZERO, 0).reshape(-1, width)
    blocks = torch.cat([tensor.scales.reshape(-1, 1), pack_codes(codes)], dim=-1)
    return GgufTensor(blocks.view(tensor.out_features, -1), GgufScheme(TYPE))


def gguf_to_fp4(tensor: GgufTensor) -> Fp4Tensor:
    """The codes and exponents of MXFP4 blocks."""
    blocks = tensor.data.reshape(-1, tensor.scheme.block[1])
    return Fp4Tensor(
        table_codes(blocks, 1).view(tensor.shape),
        blocks[:, 0].reshape(tensor.out_features, -1).contiguous(),
        Fp4Scheme("mxfp4"),
    )
