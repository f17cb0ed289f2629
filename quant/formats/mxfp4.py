"""MXFP4 expert weights of gpt-oss (`quant_method: mxfp4`), read only.

All experts of a layer are stored in two tensors per projection `P`, `gate_up_proj` and `down_proj`:

    P_blocks  uint8 [experts, out, in/32, 16]   two e2m1 codes a byte, the first in the low nibble
    P_scales  uint8 [experts, out, in/32]       exponents of two, with a bias of 127

Source: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.
"""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..kinds.fp4.scheme import Fp4Scheme
from ..tensors.fp4 import Fp4Tensor
from .base import TensorSource, expect_dtype, expect_shape, unpack_nibbles

METHOD = "mxfp4"
BLOCK = 32


def mxfp4_names(projection: str) -> tuple[str, str]:
    """Tensor names of one projection of a layer's experts."""
    return f"{projection}_blocks", f"{projection}_scales"


def read_mxfp4(
    source: TensorSource, projection: str, num_experts: int, out_features: int, in_features: int
) -> list[Fp4Tensor]:
    """Each expert's weight `[out, in]`, as 4-bit codes.

    Raises:
        BadInput: a tensor is missing, or its shape contradicts the config.
    """
    if in_features % BLOCK:
        raise BadInput(f"{projection} has {in_features} inputs: mxfp4 takes multiples of {BLOCK}")
    blocks_name, scales_name = mxfp4_names(projection)
    shape = (num_experts, out_features, in_features // BLOCK)
    blocks = expect_shape(blocks_name, source.tensor(blocks_name), (*shape, BLOCK // 2))
    scales = expect_shape(scales_name, source.tensor(scales_name), shape)
    expect_dtype(blocks_name, blocks, torch.uint8)
    expect_dtype(scales_name, scales, torch.uint8)
    scheme = Fp4Scheme("mxfp4")
    experts: list[Fp4Tensor] = []
    for packed, exponents in zip(blocks, scales, strict=True):
        codes = unpack_nibbles(packed.reshape(out_features, -1))
        experts.append(Fp4Tensor(codes, exponents, scheme))
    return experts
