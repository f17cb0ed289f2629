"""Round to nearest in 8-bit floating point (e4m3), with one scale per tensor, channel or block."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..base.errors import BadInput
from ..kinds.fp8.scheme import FloatScheme
from ..tensors.fp8 import BLOCK, E4M3_MAX, Fp8Tensor
from .base import Parameters
from .scalar_grid import Affine, ScalarGrid


class FloatGrid(ScalarGrid):
    """e4m3, with a scale for each output channel, tensor or block; its parameters are the scales.

    Blocks of 128 channels are fitted together, of all rows; a row or a tensor is one group, and so is a row
    that ends in a smaller block.

    Args:
        input_scale: float32 `[1]`, for a scheme with static activations.
    """

    def __init__(
        self,
        scheme: FloatScheme,
        out_features: int,
        in_features: int,
        scale_dtype: torch.dtype,
        *,
        input_scale: torch.Tensor | None = None,
    ):
        self.scheme, self.scale_dtype, self._shape = (
            scheme,
            scale_dtype,
            (out_features, in_features),
        )
        whole = scheme.granularity == "block" and in_features % BLOCK == 0
        self.group = BLOCK if whole else in_features
        self.rows_alone = scheme.granularity == "channel"
        self._input_scale = input_scale

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return (float_scales(values.flatten(1), self.scheme, self.scale_dtype),)

    def affine(self, parameters: Parameters) -> Affine:
        scales = parameters[0].to(torch.float32)
        if self.scheme.granularity == "block":
            out_features, in_features = self._shape
            scales = scales.repeat_interleave(BLOCK, 0)[:out_features]
            if self.group != BLOCK:
                scales = scales.repeat_interleave(BLOCK, 1)[:, :in_features]
                return Affine(scales.unsqueeze(1))
        return Affine(scales.unsqueeze(-1))

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        scaled.copy_(scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> Fp8Tensor:
        codes = self.levels(values, parameters).to(torch.float8_e4m3fn)
        return Fp8Tensor(codes, parameters[0], self.scheme, self._input_scale)


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
    scales = float_scales(weight, scheme, scale_dtype)
    if not bool(torch.isfinite(scales).all()):
        raise BadInput(f"{name} holds values too large for {scale_dtype} scales")
    divisors = scales.to(torch.float32)
    if scheme.granularity == "block":
        divisors = divisors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        divisors = divisors[:out_features, :in_features]
    values = (weight / divisors).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8Tensor(values, scales, scheme, input_scale)


def float_scales(
    weight: torch.Tensor, scheme: FloatScheme, scale_dtype: torch.dtype
) -> torch.Tensor:
    """The scales of a weight `[out, in]` as they are stored, in their dtype; infinite where they overflow."""
    out_features, in_features = weight.shape
    rows, columns = scheme.scale_shape(out_features, in_features)
    if scheme.granularity == "block":
        padding = (0, columns * BLOCK - in_features, 0, rows * BLOCK - out_features)
        blocks = functional.pad(weight, padding).view(rows, BLOCK, columns, BLOCK)
        largest = blocks.abs().amax(dim=(1, 3))
    else:
        largest = weight.abs().view(rows, -1).amax(dim=1, keepdim=True)
    scales = (largest / E4M3_MAX).to(scale_dtype)
    return torch.where(scales == 0, torch.ones_like(scales), scales)
