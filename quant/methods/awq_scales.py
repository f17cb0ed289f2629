"""AWQ's grid of input scales, from the channels' activation and weight magnitudes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

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
