"""Rounding the input of a linear to eight bits, as schemes with quantized activations ask for."""

from __future__ import annotations

import torch

from ...quant.scheme import Activations
from ...quant.tensors.fp8 import E4M3_MAX


def round_activations(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """What an 8-bit kernel would see of `x [tokens, in]`: rounded to the grid, and back in `x`'s dtype.

    The ranges are those of compressed-tensors: int8 `max|x| / 127.5`, e4m3 `max|x| / 448`. A token's
    result depends on that token alone unless the scale is static, when it depends on no token at all.

    Args:
        input_scale: float32 `[1]`, for static activations.
    """
    values = x.to(torch.float32)
    runs = values.unflatten(-1, (-1, 128)) if activations.granularity == "group128" else values
    if activations.dynamic:
        largest = runs.abs().amax(dim=-1, keepdim=True)
        scale = largest / (127.5 if activations.kind == "int8" else E4M3_MAX)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    else:
        assert input_scale is not None
        scale = input_scale.to(torch.float32)
    scaled = runs / scale
    if activations.kind == "int8":
        rounded = torch.round(scaled).clamp_(-128, 127)
    else:
        rounded = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return (rounded * scale).view_as(values).to(x.dtype)
