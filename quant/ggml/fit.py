"""Least-squares steps and offsets of single runs of weights, over a search of step sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Rounds multiples of a step to the values of a grid.
Nearest = Callable[[torch.Tensor], torch.Tensor]

_VALUES = 2**17  # weights per chunk of a search
_SCALE_SHIFTS = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0)


def fit_affine(
    x: torch.Tensor, weights: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and offset per run, `[..., runs]`, for `x ≈ step * code - offset`; neither is negative.

    Args:
        x, weights: float32 `[..., runs, width]`.
        levels: the largest code.
    """
    low, high = x.aminmax(dim=-1, keepdim=True)
    low = low.clamp(max=0)
    span = high - low
    best_step = span / levels
    best_low = low
    best_error = torch.full_like(span, torch.inf)
    sum_w, sum_x = weights.sum(dim=-1, keepdim=True), (weights * x).sum(dim=-1, keepdim=True)
    from_low, inverse_span = x - low, reciprocal(span)
    for shift in _affine_shifts(levels):
        codes = (from_low * ((levels + shift) * inverse_span)).round_().clamp_(0, levels)
        weighted = weights * codes
        sum_l = weighted.sum(dim=-1, keepdim=True)
        sum_ll = (weighted * codes).sum(dim=-1, keepdim=True)
        sum_xl = (weighted * x).sum(dim=-1, keepdim=True)
        determinant = sum_w * sum_ll - sum_l * sum_l
        step = (sum_w * sum_xl - sum_x * sum_l) / determinant
        offset = (sum_ll * sum_x - sum_l * sum_xl) / determinant
        through_zero = offset > 0
        step = torch.where(through_zero, sum_xl / sum_ll, step)
        offset = offset.clamp(max=0)
        error = (weights * (codes * step + offset - x).square_()).sum(dim=-1, keepdim=True)
        # A comparison with NaN is false, so runs without two different codes keep their values.
        better = (error < best_error) & (step > 0)
        best_error = torch.where(better, error, best_error)
        best_step = torch.where(better, step, best_step)
        best_low = torch.where(better, offset, best_low)
    return best_step.squeeze(-1), -best_low.squeeze(-1)


def fit_signed(
    x: torch.Tensor, weights: torch.Tensor, nearest: Nearest, extremes: tuple[float, ...]
) -> torch.Tensor:
    """Step of each run, `[..., runs]`, for `x ≈ step * value`; it may be negative.

    The value of largest magnitude is tried as each of `extremes`.
    """
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    inverse = reciprocal(largest)
    best_step, best_gain = largest / extremes[len(extremes) // 2], torch.zeros_like(largest)
    for extreme in extremes:
        values = nearest(x * (extreme * inverse))
        weighted = weights * values
        products = (weighted * x).sum(dim=-1, keepdim=True)
        squares = (weighted * values).sum(dim=-1, keepdim=True)
        gain = products * products / squares  # reduction of the error against all zeros
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_step = torch.where(better, products / squares, best_step)
    return best_step.squeeze(-1)


def fit_positive(
    values: torch.Tensor, weights: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step for a block's runs, `[n]`, and codes `[n, runs]`: `values ≈ step * code`, all ≥ 0."""
    largest = values.amax(dim=-1, keepdim=True)
    best_step, best_codes = torch.zeros_like(largest), torch.zeros_like(values)
    best_error = torch.full_like(largest, torch.inf)
    for shift in _SCALE_SHIFTS:
        codes = (values * ((levels + shift) * reciprocal(largest))).round().clamp(0, levels)
        squares = (weights * codes * codes).sum(dim=-1, keepdim=True)
        products = (weights * values * codes).sum(dim=-1, keepdim=True)
        step = half(torch.where(squares > 0, products / squares, 0.0))
        codes = (values * reciprocal(step)).round().clamp(0, levels)
        error = (weights * (codes * step - values).square()).sum(dim=-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_step = torch.where(better, step, best_step)
        best_codes = torch.where(better, codes, best_codes)
    return best_step.squeeze(-1), best_codes


def in_chunks(
    search: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    x: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What a search gives for blocks `[n, runs, width]`, as many at a time as a core's cache holds."""
    at_once = max(1, _VALUES // x[0].numel())
    chunks = zip(x.split(at_once), weights.split(at_once), strict=True)
    parts = [search(*chunk) for chunk in chunks]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def half(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, as float32."""
    return values.to(torch.float16).to(torch.float32)


def reciprocal(values: torch.Tensor) -> torch.Tensor:
    """`1 / values`, and 0 for 0."""
    return torch.where(values == 0, 0.0, 1 / values)


def _affine_shifts(levels: int) -> tuple[float, ...]:
    """What is added to the largest code for the steps tried: finer where there are few codes."""
    size = 20 if levels < 8 else 10
    return tuple(step / size for step in range(-size, size + 1))


def error_weights(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """The weight of each squared error of blocks `[n, runs, width]`.

    Importance is increased for large weights, as in ggml; without importance, large weights alone count more.
    """
    if importance is None:
        return x.square().mean(dim=-1, keepdim=True).sqrt() + x.abs()
    spread = 2 * x.square().mean(dim=(1, 2), keepdim=True)
    return importance.view_as(x) * (spread + x.square()).sqrt()


def whole(middle: int) -> Nearest:
    """Whole numbers from `-middle` to `middle - 1`."""
    return lambda scaled: scaled.round().clamp_(-middle, middle - 1)


def extremes_of(middle: int) -> tuple[float, ...]:
    """The largest weight may take the code `-middle`, so a step may be negative."""
    return tuple(-(middle + shift / 10) for shift in range(-9, 10))
