"""compressed-tensors' layouts of 4-bit floats: `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.

Per linear `P`:

    P.weight_packed        uint8  [out, in/2]    two e2m1 codes a byte, the even column in the low nibble
    P.weight_scale         e4m3   [out, in/16]   NVFP4, in units of the global scale
                           uint8  [out, in/32]   MXFP4, exponents of two with a bias of 127
    P.weight_global_scale  float32  [1]          NVFP4: 448 * 6 / max|w|, a divisor of the scales
    P.input_global_scale   float32  [1]          NVFP4 with quantized inputs: the same of the inputs
"""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..kinds.fp4.scheme import Fp4Scheme
from ..tensors.fp4 import Fp4Tensor
from .base import (
    TensorSource,
    expect_dtype,
    expect_matrix,
    expect_shape,
    pack_nibbles,
    unpack_nibbles,
)


def check_blocks(module: str, in_features: int, scheme: Fp4Scheme) -> None:
    """Raises BadInput naming the module whose rows are no whole blocks."""
    if in_features % scheme.block_size:
        raise BadInput(
            f"{module} has {in_features} inputs, and {scheme.kind} takes multiples of "
            f"{scheme.block_size}: leave it out with --ignore"
        )


def pack_fp4(module: str, tensor: Fp4Tensor) -> dict[str, torch.Tensor]:
    """Write either layout."""
    stored = {
        f"{module}.weight_packed": pack_nibbles(tensor.codes),
        f"{module}.weight_scale": tensor.scales.contiguous(),
    }
    for name, scale in (("weight", tensor.global_scale), ("input", tensor.input_scale)):
        if scale is not None:
            stored[f"{module}.{name}_global_scale"] = scale.reshape(1)
    return stored


def unpack_fp4(module: str, source: TensorSource, scheme: Fp4Scheme) -> Fp4Tensor:
    """Read either layout."""
    name = f"{module}.weight_packed"
    packed = expect_matrix(name, source.tensor(name), torch.uint8)
    codes = unpack_nibbles(packed)
    static = scheme.activations is not None and not scheme.activations.dynamic
    nvidia = scheme.kind == "nvfp4"
    return Fp4Tensor(
        codes=codes,
        scales=block_scales(f"{module}.weight_scale", source, codes, scheme),
        scheme=scheme,
        global_scale=one_number(f"{module}.weight_global_scale", source) if nvidia else None,
        input_scale=one_number(f"{module}.input_global_scale", source) if static else None,
    )


def block_scales(
    name: str, source: TensorSource, codes: torch.Tensor, scheme: Fp4Scheme
) -> torch.Tensor:
    """The stored scales of the blocks of `codes` `[out, in]`."""
    dtype = torch.float8_e4m3fn if scheme.kind == "nvfp4" else torch.uint8
    scales = expect_dtype(name, source.tensor(name), dtype)
    check_blocks(name.rpartition(".")[0], codes.shape[1], scheme)
    return expect_shape(name, scales, (codes.shape[0], codes.shape[1] // scheme.block_size))


def one_number(name: str, source: TensorSource) -> torch.Tensor:
    """A scale of a whole tensor, float32 `[1]`; BadInput where it is no positive number."""
    scale = expect_dtype(name, source.tensor(name), torch.float32)
    if scale.numel() != 1:
        raise BadInput(f"{name} has shape {tuple(scale.shape)}: only one scale is supported")
    if not float(scale) > 0 or not bool(torch.isfinite(scale)):
        raise BadInput(f"{name} is {float(scale):g}, and a scale is a positive number")
    return scale.reshape(1)
