"""K-quant search: scales, minimums and codes of least weighted squared error.

After ggml's `make_qkx2_quants` and `make_qx_quants`: several step sizes around the min-max one are tried;
each gives codes, the codes give the least-squares scale (and offset), and the best is kept. The sub-blocks'
scales are then quantized under one super-block scale, neighbouring scale codes are tried on the stored grid,
and the super-block's scales are refitted to the codes where that helps.

Shapes: a block of 256 weights is `[runs, width]` (sub-blocks, weights), with any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch

from .fit import Nearest, fit_affine, fit_positive, fit_signed, half, reciprocal

_NEIGHBOURS = tuple(product((0, -1, 1), repeat=2))


class AffineCodes(NamedTuple):
    """`w = d * scale * code - dmin * minimum`.

    Attributes:
        scales, lows: float32 `[n, runs]`, whole numbers.
        codes: float32 `[n, runs, width]`, whole numbers.
        heads: float16 `[n, 2]`: d and dmin.
    """

    scales: torch.Tensor
    codes: torch.Tensor
    lows: torch.Tensor
    heads: torch.Tensor


class SignedCodes(NamedTuple):
    """`w = d * scale * value`.

    Attributes:
        scales: float32 `[n, runs]`, whole numbers.
        values: float32 `[n, runs, width]`, of the grid.
        head: float16 `[n, 1]`: d.
    """

    scales: torch.Tensor
    values: torch.Tensor
    head: torch.Tensor


def search_affine(
    x: torch.Tensor, weights: torch.Tensor, levels: int, scale_levels: int, rounds: int
) -> AffineCodes:
    """Blocks with a scale and a minimum for each run.

    Args:
        x: float32 `[n, runs, width]`.
        weights: positive, of the same shape: the weight of each squared error.
        levels, scale_levels: the largest code, and the largest code of a scale or minimum.
        rounds: of trying neighbouring scale codes and refitting the heads.
    """
    steps, offsets = fit_affine(x, weights, levels)
    total = weights.sum(dim=-1)
    scale, scale_codes = fit_positive(steps, total, scale_levels)
    low, low_codes = fit_positive(offsets, total, scale_levels)
    heads = torch.stack([scale, low], dim=-1).to(torch.float16)

    def on_grid(
        heads: torch.Tensor, scale_codes: torch.Tensor, low_codes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes on the stored grid, and each run's weighted error `[n, runs]`."""
        step, offset = heads.to(torch.float32).unsqueeze(1).unbind(dim=-1)
        step, offset = (step * scale_codes).unsqueeze(-1), (offset * low_codes).unsqueeze(-1)
        codes = ((x + offset) * reciprocal(step)).round_().clamp_(0, levels)
        return codes, (weights * (codes * step - offset - x).square_()).sum(dim=-1)

    codes, errors = on_grid(heads, scale_codes, low_codes)
    for _ in range(rounds):
        first = scale_codes, low_codes
        for up, down in _NEIGHBOURS[1:]:
            tried = (
                (first[0] + up).clamp_(0, scale_levels),
                (first[1] + down).clamp_(0, scale_levels),
            )
            other, other_errors = on_grid(heads, *tried)
            better = other_errors < errors
            errors = torch.where(better, other_errors, errors)
            codes = torch.where(better.unsqueeze(-1), other, codes)
            scale_codes = torch.where(better, tried[0], scale_codes)
            low_codes = torch.where(better, tried[1], low_codes)
        refitted = _refit_affine(x, weights, codes, scale_codes, low_codes, heads)
        other, other_errors = on_grid(refitted, scale_codes, low_codes)
        better = (other_errors.sum(dim=-1) < errors.sum(dim=-1)).unsqueeze(-1)
        errors = torch.where(better, other_errors, errors)
        codes = torch.where(better.unsqueeze(-1), other, codes)
        heads = torch.where(better, refitted, heads)
    return AffineCodes(scale_codes, codes, low_codes, heads)


def search_signed(
    x: torch.Tensor,
    weights: torch.Tensor,
    nearest: Nearest,
    extremes: tuple[float, ...],
    scale_middle: int,
) -> SignedCodes:
    """Blocks with a signed scale for each run.

    Args:
        x, weights: see `search_affine`.
        nearest: rounds multiples of the step to the grid's values.
        extremes: values that the largest weight of a run is tried as, beyond the grid too.
        scale_middle: scales' codes are `-scale_middle .. scale_middle - 1`.
    """
    steps = fit_signed(x, weights, nearest, extremes)
    # An error of the step is multiplied by the codes, which grow with the weights.
    cost = (weights * x.square()).sum(dim=-1) * reciprocal(steps).square()

    def nearest_scale(values: torch.Tensor) -> torch.Tensor:
        return values.round().clamp_(-scale_middle, scale_middle - 1)

    wide = tuple(-(scale_middle + shift / 10) for shift in range(-9, 10))
    head = half(fit_signed(steps.unsqueeze(1), cost.unsqueeze(1), nearest_scale, wide))
    scales = nearest_scale(steps * reciprocal(head))

    def on_grid(head: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = (head * scales).unsqueeze(-1)
        values = nearest(x * reciprocal(step))
        return values, (weights * (values * step - x).square_()).sum(dim=-1)

    return _refine(x, weights, head, scales, on_grid, scale_middle)


def _refine(
    x: torch.Tensor,
    weights: torch.Tensor,
    head: torch.Tensor,
    scales: torch.Tensor,
    on_grid: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    scale_middle: int,
) -> SignedCodes:
    """Try neighbouring scale codes, then the least-squares head; twice."""
    values, errors = on_grid(head, scales)
    for _ in range(2):
        first = scales
        for shift in (-1, 1):
            tried = (first + shift).clamp_(-scale_middle, scale_middle - 1)
            other, other_errors = on_grid(head, tried)
            better = other_errors < errors
            errors = torch.where(better, other_errors, errors)
            values = torch.where(better.unsqueeze(-1), other, values)
            scales = torch.where(better, tried, scales)
        grid = values * scales.unsqueeze(-1)
        weighted = weights * grid
        squares = (weighted * grid).sum(dim=(1, 2))
        products = (weighted * x).sum(dim=(1, 2))
        refitted = torch.where(squares > 0, products / squares, head.squeeze(-1))
        refitted = half(refitted.unsqueeze(-1))
        other, other_errors = on_grid(refitted, scales)
        better = (other_errors.sum(dim=-1) < errors.sum(dim=-1)).unsqueeze(-1)
        errors = torch.where(better, other_errors, errors)
        values = torch.where(better.unsqueeze(-1), other, values)
        head = torch.where(better, refitted, head)
    return SignedCodes(scales, values, head.to(torch.float16))


def _refit_affine(
    x: torch.Tensor,
    weights: torch.Tensor,
    codes: torch.Tensor,
    scale_codes: torch.Tensor,
    low_codes: torch.Tensor,
    heads: torch.Tensor,
) -> torch.Tensor:
    """Least-squares d and dmin for given codes, float16 `[n, 2]`; `heads` where singular."""
    grid, low = codes * scale_codes.unsqueeze(-1), low_codes.unsqueeze(-1).expand_as(codes)
    both = (1, 2)
    weighted_grid, weighted_low = weights * grid, weights * low
    aa, ab = (weighted_grid * grid).sum(dim=both), (weighted_grid * low).sum(dim=both)
    bb = (weighted_low * low).sum(dim=both)
    ax, bx = (weighted_grid * x).sum(dim=both), (weighted_low * x).sum(dim=both)
    determinant = aa * bb - ab * ab
    solved = torch.stack([bb * ax - ab * bx, ab * ax - aa * bx], dim=-1) / determinant.unsqueeze(-1)
    usable = (torch.isfinite(solved) & (solved >= 0)).all(dim=-1, keepdim=True)
    return torch.where(usable, solved.to(torch.float16), heads)
