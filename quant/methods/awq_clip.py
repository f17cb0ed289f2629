"""The clipping half of AWQ: a group's range may shrink where its largest weights are not worth it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..scheme import IntScheme
from .base import InputStatistics
from .int_grid import round_to_nearest

_STEPS = 20
_MAX_SHRINK = 0.5


class Clipped(NamedTuple):
    """A weight `[out, in]` after clipping, and the share of its groups that were clipped."""

    weight: torch.Tensor
    share: float


def clip_groups(
    weight: torch.Tensor,
    gram: torch.Tensor,
    columns: torch.Tensor,
    scheme: IntScheme,
    scale_dtype: torch.dtype,
) -> Clipped:
    """Clamp each group to the magnitude that gives the least output error on the calibration data.

    Ranges from the full one down to half of it are tried in steps of 1/20. Each group is judged alone,
    as in AWQ; a row whose groups together come out worse than unclipped keeps its full ranges.

    Args:
        weight: float32 `[out, in]`, already scaled.
        gram: `XᵀX` of the unscaled input `[in, in]`.
        columns: the input scales `[in]` that `weight` was multiplied with.
    """
    out_features, in_features = weight.shape
    groups = scheme.num_groups(in_features)
    scaled_gram = gram / columns / columns[:, None]
    blocks = scaled_gram.view(groups, in_features // groups, groups, -1)
    blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    grouped = weight.view(out_features, groups, -1)
    largest = grouped.abs().amax(dim=-1, keepdim=True)

    best_limit = largest
    best_error = torch.full((out_features, groups), torch.inf)
    for step in range(int(_MAX_SHRINK * _STEPS)):
        limit = largest * (1 - step / _STEPS)
        delta = _rounded(grouped, limit, scheme, scale_dtype) - grouped
        by_group = delta.transpose(0, 1)
        error = (torch.bmm(by_group, blocks) * by_group).sum(dim=-1).T
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_limit = torch.where(better.unsqueeze(-1), limit, best_limit)

    whole = InputStatistics(in_features)
    whole.gram = scaled_gram
    clipped_rows = whole.row_errors(
        (_rounded(grouped, best_limit, scheme, scale_dtype) - grouped).view_as(weight)
    )
    full_rows = whole.row_errors(
        (_rounded(grouped, largest, scheme, scale_dtype) - grouped).view_as(weight)
    )
    accepted = (clipped_rows < full_rows)[:, None, None]
    limit = torch.where(accepted, best_limit, largest)
    return Clipped(
        weight=grouped.clamp(-limit, limit).view_as(weight),
        share=float((limit < largest).to(torch.float32).mean()),
    )


def _rounded(
    grouped: torch.Tensor, limit: torch.Tensor, scheme: IntScheme, scale_dtype: torch.dtype
) -> torch.Tensor:
    """What is read back of `[out, groups, group_size]` weights clamped to `limit` and rounded."""
    clamped = grouped.clamp(-limit, limit).flatten(1)
    return round_to_nearest(clamped, scheme, scale_dtype).dequantize().view_as(grouped)
