"""AWQ's candidates: the grid of input scales, and the clipping range of each group of least output error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..base.device import rows_at_once
from ..kinds.base.grid import where
from ..kinds.integer.kind import range_grid
from ..kinds.integer.scheme import IntScheme
from .base import quadratic_form

GRID = 20
_ROWS = 256  # small enough to stay in a core's cache


def scale_candidates(
    mean_abs: torch.Tensor, weights: Sequence[torch.Tensor], group_size: int
) -> Iterator[tuple[float, torch.Tensor]]:
    """The grid of input scales: `s = x^a / (w^(1-a) + 1e-4)` for 20 exponents `a`, centred around 1.

    Args:
        mean_abs: mean magnitude of each input channel `[in]`.
        weights: the linears that share the input, each `[out, in]`.
        group_size: number of weights of a row that share a scale.

    Yields:
        The exponent, and positive finite scales `[in]`.
    """
    mean_weight = _mean_share(weights, group_size)
    for step in range(GRID):
        ratio = step / GRID
        scales = mean_abs.pow(ratio) / (mean_weight.pow(1 - ratio) + 1e-4)
        scales = scales.clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        yield ratio, torch.where(torch.isfinite(scales) & (scales > 0), scales, 1.0)


def _mean_share(weights: Sequence[torch.Tensor], group_size: int) -> torch.Tensor:
    """Mean ratio of an input channel's weights to their group's largest magnitude, `[in]`."""
    total = torch.zeros(weights[0].shape[1], dtype=torch.float64)
    for weight in weights:
        for rows in weight.split(_ROWS):
            grouped = rows.abs().view(len(rows), -1, group_size)
            largest = grouped.amax(dim=-1, keepdim=True)
            grouped = grouped.div_(torch.where(largest > 0, largest, 1.0))
            total += grouped.view(rows.shape).sum(dim=0)
    return (total / sum(len(weight) for weight in weights)).to(torch.float32)


_STEPS = 20
_MAX_SHRINK = 0.5
_MIN_ROWS, _VALUES = 256, 2**17  # weights per chunk: small enough to stay in a core's cache


class Clipped(NamedTuple):
    """A weight `[out, in]` after clipping, and the share of clipped groups in each row `[out]`."""

    weight: torch.Tensor
    shares: torch.Tensor


def clip_groups(
    weight: torch.Tensor,
    gram: torch.Tensor,
    columns: torch.Tensor,
    scheme: IntScheme,
    scale_dtype: torch.dtype,
) -> Clipped:
    """Clamp each group to the magnitude of least output error on the calibration data.

    Ranges from the full one down to half of it are tried in steps of 1/20. Each group is judged
    alone, as in AWQ; the caller checks the combined effect on a row.

    Args:
        weight: float32 `[out, in]`, already scaled.
        gram: `XᵀX` of the unscaled input `[in, in]`.
        columns: the input scales `[in]` that `weight` was multiplied with.
    """
    out_features, in_features = weight.shape
    size = in_features // scheme.num_groups(in_features)
    clipped = torch.empty_like(weight)
    num_clipped = torch.zeros(out_features)
    at_once = max(_MIN_ROWS, rows_at_once(weight.device, _VALUES, size))
    for start in range(0, in_features, size):
        group = slice(start, start + size)
        block = gram[group, group] / columns[group] / columns[group, None]
        for first in range(0, out_features, at_once):
            rows = slice(first, first + at_once)
            part = weight[rows, group].contiguous()
            limit, largest = _best_limit(part, block, scheme, scale_dtype)
            torch.clamp(part, -limit[:, None], limit[:, None], out=part)
            clipped[rows, group] = part
            num_clipped[rows] += limit < largest
    return Clipped(clipped, num_clipped * size / in_features)


def _best_limit(
    part: torch.Tensor, block: torch.Tensor, scheme: IntScheme, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of the tried limits of groups `[rows, size]`, and the largest magnitudes, both `[rows]`."""
    low, high = part.aminmax(dim=-1)
    largest = torch.maximum(-low, high)
    best = torch.full_like(largest, torch.inf, dtype=torch.float64), largest
    delta = torch.empty_like(part)
    for step in range(int(_MAX_SHRINK * _STEPS)):
        limit = largest * (1 - step / _STEPS)
        scales, zeros = range_grid(
            torch.maximum(low, -limit), torch.minimum(high, limit), scheme, scale_dtype
        )
        scale, zero = (values.to(torch.float32)[:, None] for values in (scales, zeros))
        torch.clamp(part, -limit[:, None], limit[:, None], out=delta)
        delta.div_(scale).round_().clamp_(-zero, scheme.max_code - zero).mul_(scale).sub_(part)
        error = quadratic_form(delta, block)
        best = where(error < best[0], (error, limit), best)
    return best[1], largest
