"""Round to nearest on a uniform grid: every weight goes to the closest point of its group's."""

from __future__ import annotations

import torch

from ..errors import BadInput
from ..scheme import IntScheme
from ..tensors.integer import IntTensor


def group_ranges(
    grouped: torch.Tensor, scheme: IntScheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero code of each group.

    Symmetric: `scale = max|w| / ((2**b - 1) / 2)`, the range rule of compressed-tensors. Asymmetric:
    `scale = (max - min) / (2**b - 1)` with 0 inside the range, `zero = round(-min / scale)`. The scale
    is rounded to `dtype`, in which it will be stored, before anything is derived from it; otherwise the
    codes would be the best ones for a grid that nobody ever reads back.

    Args:
        grouped: float32 `[out, groups, group_size]`.

    Returns:
        Scales in `dtype` and zeros as uint8, both `[out, groups]`.
    """
    low, high = grouped.aminmax(dim=-1)
    if scheme.symmetric:
        scales = torch.maximum(-low, high) / (scheme.max_code / 2)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = (high - low) / scheme.max_code
    scales = scales.to(dtype)
    # A group of zeros, or of weights too small for `dtype`, is exactly zero under any finite scale.
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if scheme.symmetric:
        zeros = torch.full_like(low, scheme.middle)
    else:
        zeros = torch.round(-low / scales.to(torch.float32)).clamp(0, scheme.max_code)
    return scales, zeros.to(torch.uint8)


def round_to_nearest(
    weight: torch.Tensor, scheme: IntScheme, scale_dtype: torch.dtype, *, name: str = "weight"
) -> IntTensor:
    """Quantize a weight `[out, in]` without looking at any data.

    Args:
        scale_dtype: the dtype that the format stores scales in.
        name: how an error calls this weight.

    Raises:
        BadInput: the weight holds NaN or infinity, a scale overflows `scale_dtype`, or the group size
            does not divide the row.
    """
    out_features, in_features = weight.shape
    grouped = weight.to(torch.float32).reshape(out_features, scheme.num_groups(in_features), -1)
    if not bool(torch.isfinite(grouped).all()):
        raise BadInput(f"{name} holds NaN or infinite values: the checkpoint is damaged")
    scales, zeros = group_ranges(grouped, scheme, scale_dtype)
    if not bool(torch.isfinite(scales).all()):
        raise BadInput(f"{name} holds values too large for {scale_dtype} scales")
    codes = torch.round(grouped / scales.to(torch.float32).unsqueeze(-1))
    codes = (codes + zeros.to(torch.float32).unsqueeze(-1)).clamp_(0, scheme.max_code)
    return IntTensor(
        codes=codes.to(torch.uint8).view(out_features, in_features),
        scales=scales,
        zeros=zeros,
        scheme=scheme,
    )
