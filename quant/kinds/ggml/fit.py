"""Least-squares steps and offsets for ggml's blocks: of single runs of weights, and of K-quants' sub-blocks.

After ggml's `make_qkx2_quants` and `make_qx_quants`: several step sizes around the min-max one are tried;
each gives codes, these the least-squares scale (and offset), and the best is kept. Sub-blocks' scales are
quantized under one super-block scale, neighbours are tried, and the super-block's scales refitted.

On a CPU `search.c` does so, to the same bits. A block of 256 weights is `[runs, width]`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import torch

from ....base.build import beside, fields
from ...base.device import rows_at_once
from ...base.sums import folded
from ..base.grid import where

# Rounds multiples of a step to the values of a grid.
Nearest = Callable[[torch.Tensor], torch.Tensor]
# Sums the last dimension, which stays: torch's own sum, or `folded`, which is slower and has a fixed order.
Add = Callable[[torch.Tensor], torch.Tensor]

_VALUES = 2**17  # weights per chunk of a search
_SCALE_SHIFTS = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0)


def any_order(values: torch.Tensor) -> torch.Tensor:
    return values.sum(dim=-1, keepdim=True)


def fit_affine(
    x: torch.Tensor, weights: torch.Tensor, levels: int, add: Add = any_order
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and offset of runs `[..., runs]`, for `x ≈ step * code - offset`; `levels`: largest code."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    low = low.clamp(max=0)
    span = high - low
    best = torch.full_like(span, torch.inf), span / levels, low
    sum_w, sum_x = add(weights), add(weights * x)
    from_low, inverse_span = x - low, reciprocal(span)
    for shift in _affine_shifts(levels):
        codes = (from_low * ((levels + shift) * inverse_span)).round_().clamp_(0, levels)
        weighted = weights * codes
        sum_l = add(weighted)
        sum_ll = add(weighted * codes)
        sum_xl = add(weighted * x)
        determinant = sum_w * sum_ll - sum_l * sum_l
        step = (sum_w * sum_xl - sum_x * sum_l) / determinant
        offset = (sum_ll * sum_x - sum_l * sum_xl) / determinant
        through_zero = offset > 0
        step = torch.where(through_zero, sum_xl / sum_ll, step)
        offset = offset.clamp(max=0)
        error = add(weights * (codes * step + offset - x).square_())
        # A comparison with NaN is false, so runs without two different codes keep their values.
        best = where((error < best[0]) & (step > 0), (error, step, offset), best)
    _, best_step, best_low = best
    return best_step.squeeze(-1), -best_low.squeeze(-1)


def fit_signed(
    x: torch.Tensor,
    weights: torch.Tensor,
    nearest: Nearest,
    extremes: tuple[float, ...],
    add: Add = any_order,
) -> torch.Tensor:
    """Steps of runs, also negative, for `x ≈ step * value`; the largest weight is tried as `extremes`."""
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    inverse = reciprocal(largest)
    best = torch.zeros_like(largest), largest / extremes[len(extremes) // 2]
    for extreme in extremes:
        values = nearest(x * (extreme * inverse))
        weighted = weights * values
        products = add(weighted * x)
        squares = add(weighted * values)
        gain = products * products / squares  # reduction of the error against all zeros
        best = where(gain > best[0], (gain, products / squares), best)
    return best[1].squeeze(-1)


def fit_positive(
    values: torch.Tensor, weights: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step for a block's runs, `[n]`, and codes `[n, runs]`: `values ≈ step * code`, all ≥ 0."""
    largest = values.amax(dim=-1, keepdim=True)
    best = torch.full_like(largest, torch.inf), torch.zeros_like(largest), torch.zeros_like(values)
    for shift in _SCALE_SHIFTS:
        codes = (values * ((levels + shift) * reciprocal(largest))).round().clamp(0, levels)
        squares = folded(weights * codes * codes)
        products = folded(weights * values * codes)
        step = half(torch.where(squares > 0, products / squares, 0.0))
        codes = (values * reciprocal(step)).round().clamp(0, levels)
        error = folded(weights * (codes * step - values).square())
        best = where(error < best[0], (error, step, codes), best)
    return best[1].squeeze(-1), best[2]


def in_chunks(
    search: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    x: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Search blocks `[n, runs, width]`, as many at a time as a core's cache holds, or a device with ease."""
    at_once = rows_at_once(x.device, _VALUES, x[0].numel())
    chunks = zip(x.split(at_once), weights.split(at_once), strict=True)
    parts = [search(*chunk) for chunk in chunks]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def outermost(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Lay the last dimension out as the first one on a CPU, where `folded` adds whole rows of memory."""
    if values[0].device.type != "cpu":
        return values
    return tuple(part.movedim(-1, 0).contiguous().movedim(0, -1) for part in values)


def half(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16).to(torch.float32)


def reciprocal(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, 1 / values)


def _affine_shifts(levels: int) -> tuple[float, ...]:
    """Shifts of the largest code, one for each step tried: finer where there are few codes."""
    size = 20 if levels < 8 else 10
    return tuple(step / size for step in range(-size, size + 1))


def error_weights(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Weights of squared errors `[n, runs, width]`: as in ggml large ones count more, with importance."""
    if importance is None:
        mean = folded(x.square()) / x.shape[-1]
        # A float's root by vector libraries may be off by a bit; a double's, rounded, is not.
        return mean.double().sqrt().to(x.dtype) + x.abs()
    spread = 2 * x.square().mean(dim=(1, 2), keepdim=True)
    return importance.view_as(x) * (spread + x.square()).sqrt()


def whole(middle: int) -> Nearest:
    return lambda scaled: scaled.round().clamp_(-middle, middle - 1)


def extremes_of(middle: int) -> tuple[float, ...]:
    # The largest weight may take the code `-middle`, so a step may be negative.
    return tuple(-(middle + shift / 10) for shift in range(-9, 10))


_NEIGHBOURS = tuple(product((0, -1, 1), repeat=2))


class AffineCodes(NamedTuple):
    """Scales and minimums uint8 `[n, runs]`, codes uint8 `[n, runs, width]`, d and dmin float16 `[n, 2]`."""

    scales: torch.Tensor
    codes: torch.Tensor
    lows: torch.Tensor
    heads: torch.Tensor


class SignedCodes(NamedTuple):
    """Scales int8 `[n, runs]`, values of the grid int8 `[n, runs, width]`, and d float16 `[n, 1]`."""

    scales: torch.Tensor
    values: torch.Tensor
    head: torch.Tensor


class _SearchCall(ctypes.Structure):
    """`SearchCall` of `search.c`."""

    _fields_ = [
        *fields("x weights factors scale_factors table scales codes lows heads"),
        *fields(numbers="count runs num_factors num_scale_factors least levels"),
        *fields(numbers="least_scale scale_levels rounds squares threads"),
        ("next", ctypes.c_long),
    ]


native_search = beside(__file__, "search.c")
"""The compiled search, or the reason why there is none."""


@cache
def _table(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _search_in_c(
    library: ctypes.CDLL,
    blocks: tuple[torch.Tensor, torch.Tensor | None],
    codes: tuple[int, int, int, int],
    factors: tuple[tuple[float, ...], tuple[float, ...]],
    rounds: int,
    squares: bool = False,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Scales, codes, minimums (none of signed codes) and heads. Ranges of codes and their scales; `factors`
    to try for steps, then scales (none: a head for each run and nothing else); `squares`: weights squared;
    `table`: 16 values in place of whole codes."""
    x, weights = (None if part is None else part.contiguous() for part in blocks)
    assert x is not None
    count, runs, _ = x.shape
    dtype, has_scales = torch.int8 if codes[0] else torch.uint8, bool(factors[1])
    scales = torch.empty(count if has_scales else 0, runs, dtype=dtype)
    values = torch.empty(x.shape if has_scales else 0, dtype=dtype)
    lows = torch.empty(0 if codes[0] else count, runs, dtype=dtype)
    num_heads = runs if not has_scales else 1 if codes[0] else 2
    heads = torch.empty(count, num_heads, dtype=torch.float16)
    tables = [*(_table(part) for part in factors), table]
    parts = (x, weights, *tables, scales, values, lows, heads)
    call = _SearchCall(
        *(None if part is None or not part.numel() else part.data_ptr() for part in parts),
        *(count, runs, *map(len, factors), *codes, rounds, squares, torch.get_num_threads()),
    )
    library.llmopt_search_blocks(ctypes.byref(call))
    return scales, values, lows, heads


def _native(x: torch.Tensor) -> ctypes.CDLL | None:
    return native_search().library if x.device.type == "cpu" else None


def search_affine(
    x: torch.Tensor, weights: torch.Tensor | None, levels: int, scale_levels: int, rounds: int
) -> AffineCodes:
    """Search blocks, float32 `[n, runs, width]`, with a scale and a minimum for each run. `levels` and
    `scale_levels` are the largest codes; each of `rounds` passes tries neighbouring scale codes."""
    library = _native(x)
    if library is None:
        weights = error_weights(x, None) if weights is None else weights
        return affine_in_torch(x, weights, levels, scale_levels, rounds)
    steps = tuple(levels + shift for shift in _affine_shifts(levels))
    factors = steps, tuple(scale_levels + shift for shift in _SCALE_SHIFTS)
    codes = 0, levels, 0, scale_levels
    return AffineCodes(*_search_in_c(library, (x, weights), codes, factors, rounds))


def affine_in_torch(
    x: torch.Tensor, weights: torch.Tensor, levels: int, scale_levels: int, rounds: int
) -> AffineCodes:
    """`search_affine` on any device."""
    x, weights = outermost(x, weights)
    steps, offsets = fit_affine(x, weights, levels, folded)
    total = folded(weights).squeeze(-1)
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
        return codes, folded(weights * (codes * step - offset - x).square_()).squeeze(-1)

    codes, errors = on_grid(heads, scale_codes, low_codes)
    for _ in range(rounds):
        first, best = (scale_codes, low_codes), (errors, codes, scale_codes, low_codes)
        for shifts in _NEIGHBOURS[1:]:
            tried = [
                (part + shift).clamp_(0, scale_levels)
                for part, shift in zip(first, shifts, strict=True)
            ]
            other, other_errors = on_grid(heads, *tried)
            best = where(other_errors < best[0], (other_errors, other, *tried), best)
        errors, codes, scale_codes, low_codes = best
        refitted = _refit_affine(x, weights, codes, scale_codes, low_codes, heads)
        other, other_errors = on_grid(refitted, scale_codes, low_codes)
        better = folded(other_errors) < folded(errors)
        refits = other_errors, other, refitted
        errors, codes, heads = where(better, refits, (errors, codes, heads))
    fitted = scale_codes, codes, low_codes
    scales, codes, lows = (part.to(torch.uint8).contiguous() for part in fitted)
    return AffineCodes(scales, codes, lows, heads.contiguous())


def search_whole(
    x: torch.Tensor, weights: torch.Tensor | None, middle: int, scale_middle: int
) -> SignedCodes:
    """`search_signed` for `-middle .. middle - 1`; weights: squares (6 bits), or `error_weights`."""
    library, squares = _native(x), middle == 32
    if library is None:
        if weights is None:
            weights = x.square() if squares else error_weights(x, None)
        x, weights = outermost(x, weights)
        grid = whole(middle), extremes_of(middle)
        return search_signed(x, weights, *grid, scale_middle)
    codes = -middle, middle - 1, -scale_middle, scale_middle - 1
    factors = extremes_of(middle), extremes_of(scale_middle)
    scales, values, _, head = _search_in_c(library, (x, weights), codes, factors, 2, squares)
    return SignedCodes(scales, values, head)


def search_table(
    x: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    extremes: tuple[float, ...],
    scale_middle: int,
) -> SignedCodes | None:
    """`search_signed` for a table of 16 values; with a `scale_middle` of 0 the heads of each run alone. None
    where there is no compiled search."""
    if (library := _native(x)) is None:
        return None
    scaled = extremes_of(scale_middle) if scale_middle else ()
    codes = int(table[0]), int(table[-1]), -scale_middle, scale_middle - 1
    blocks, factors = (x, weights), (extremes, scaled)
    scales, values, _, head = _search_in_c(library, blocks, codes, factors, 2, table=table)
    return SignedCodes(scales, values, head)


def search_signed(
    x: torch.Tensor,
    weights: torch.Tensor,
    nearest: Nearest,
    extremes: tuple[float, ...],
    scale_middle: int,
) -> SignedCodes:
    """Search blocks with a signed scale a run; its largest weight is tried as each of `extremes`."""
    steps = fit_signed(x, weights, nearest, extremes, folded)
    # An error of the step is multiplied by the codes, which grow with the weights.
    cost = folded(weights * x.square()).squeeze(-1) * reciprocal(steps).square()

    def nearest_scale(values: torch.Tensor) -> torch.Tensor:
        return values.round().clamp_(-scale_middle, scale_middle - 1)

    wide = extremes_of(scale_middle)
    head = half(fit_signed(steps.unsqueeze(1), cost.unsqueeze(1), nearest_scale, wide, folded))
    scales = nearest_scale(steps * reciprocal(head))

    def on_grid(head: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = (head * scales).unsqueeze(-1)
        values = nearest(x * reciprocal(step))
        return values, folded(weights * (values * step - x).square_()).squeeze(-1)

    values, errors = on_grid(head, scales)
    for _ in range(2):  # neighbouring codes of the scales, then the head of least squares
        first, best = scales, (errors, values, scales)
        for shift in (-1, 1):
            tried = (first + shift).clamp_(-scale_middle, scale_middle - 1)
            other, other_errors = on_grid(head, tried)
            best = where(other_errors < best[0], (other_errors, other, tried), best)
        errors, values, scales = best
        grid = values * scales.unsqueeze(-1)
        weighted = weights * grid
        squares = _by_block(weighted * grid)
        products = _by_block(weighted * x)
        refitted = torch.where(squares > 0, products / squares, head.squeeze(-1))[:, None]
        refitted = half(refitted)
        other, other_errors = on_grid(refitted, scales)
        better = folded(other_errors) < folded(errors)
        refits = other_errors, other, refitted
        errors, values, head = where(better, refits, (errors, values, head))
    scales, values = (part.to(torch.int8).contiguous() for part in (scales, values))
    return SignedCodes(scales, values, head.to(torch.float16).contiguous())


def _by_block(values: torch.Tensor) -> torch.Tensor:
    if values.device.type != "cpu":
        return values.sum(dim=(-2, -1))
    return folded(folded(values).squeeze(-1)).squeeze(-1)


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
    weighted_grid, weighted_low = weights * grid, weights * low
    aa, ab = _by_block(weighted_grid * grid), _by_block(weighted_grid * low)
    bb = _by_block(weighted_low * low)
    ax, bx = _by_block(weighted_grid * x), _by_block(weighted_low * x)
    determinant = aa * bb - ab * ab
    solved = torch.stack([bb * ax - ab * bx, ab * ax - aa * bx], dim=-1) / determinant.unsqueeze(-1)
    usable = (torch.isfinite(solved) & (solved >= 0)).all(dim=-1, keepdim=True)
    return torch.where(usable, solved.to(torch.float16), heads)
