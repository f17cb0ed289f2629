"""Round to nearest in 8-bit floating point (e4m3), with one scale per tensor, channel or block."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..base.errors import BadInput
from ..base.scheme import FloatScheme
from ..tensors.fp8 import BLOCK, E4M3_MAX, Fp8Tensor


def round_to_fp8(
    weight: torch.Tensor,
    scheme: FloatScheme,
    scale_dtype: torch.dtype,
    *,
    input_scale: torch.Tensor | None = None,
    name: str = "weight",
) -> Fp8Tensor:
    """Data-free quantization (RTN) of a weight `[out, in]`.

    `scale = max|w| / 448`, rounded to the dtype in which it is stored before the values are derived from
    it; the scale of all-zero values is 1. e4m3fn has no infinity, and a cast from beyond its range
    gives NaN, so values are clamped first.

    Args:
        input_scale: float32 `[1]`, for a scheme with static activations.
        name: the weight's name in error messages.

    Raises:
        BadInput: a scale overflows `scale_dtype`.
    """
    out_features, in_features = weight.shape
    rows, columns = scheme.scale_shape(out_features, in_features)
    if scheme.granularity == "block":
        padding = (0, columns * BLOCK - in_features, 0, rows * BLOCK - out_features)
        blocks = functional.pad(weight, padding).view(rows, BLOCK, columns, BLOCK)
        largest = blocks.abs().amax(dim=(1, 3))
    else:
        largest = weight.abs().view(rows, -1).amax(dim=1, keepdim=True)
    scales = (largest / E4M3_MAX).to(scale_dtype)
    if not bool(torch.isfinite(scales).all()):
        raise BadInput(f"{name} holds values too large for {scale_dtype} scales")
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    divisors = scales.to(torch.float32)
    if scheme.granularity == "block":
        divisors = divisors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        divisors = divisors[:out_features, :in_features]
    values = (weight / divisors).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8Tensor(values, scales, scheme, input_scale)
