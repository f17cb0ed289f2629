"""K-quant search: scales, minimums and codes of least weighted squared error.

After ggml's `make_qkx2_quants` and `make_qx_quants`: several step sizes around the min-max one are tried;
each gives codes, the codes give the least-squares scale (and offset), and the best is kept. The sub-blocks'
scales are then quantized to 6 (Q6_K: 8) bits under one super-block scale, codes are recomputed on the stored
grid, and the super-block's scales are refitted to those codes where that helps.

Shapes: a block of 256 weights is `[runs, width]` (sub-blocks, weights), with any leading dimensions.
"""

from __future__ import annotations

import torch

from .k_blocks import pack_affine, pack_signed

_AFFINE_SHIFTS = tuple(step / 10 for step in range(-10, 11))
_SIGNED_SHIFTS = tuple(step / 10 for step in range(-9, 10))
_SCALE_SHIFTS = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0)


def quantize_affine(
    blocks: torch.Tensor, importance: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Q4_K (`bits` 4) or Q5_K (5) blocks.

    Args:
        blocks: float32 `[n, 256]`.
        importance: positive float32 `[n, 256]`, weight of each squared error; None derives it from
            the weights.

    Returns:
        uint8 `[n, block bytes]`.
    """
    x = blocks.view(-1, 8, 32)
    if importance is None:
        weights = x.square().mean(dim=-1, keepdim=True).sqrt() + x.abs()
    else:
        spread = 2 * blocks.square().mean(dim=-1).view(-1, 1, 1)
        weights = importance.view_as(x) * (spread + x.square()).sqrt()
    levels = 2**bits - 1
    steps, offsets = _fit_affine(x, weights, levels)
    total = weights.sum(dim=-1)
    scales, scale_codes = _fit_positive(steps, total, 63)
    lows, low_codes = _fit_positive(offsets, total, 63)
    heads = torch.stack([scales, lows], dim=-1).to(torch.float16)

    def choose(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes on the grid of these heads, and each block's weighted error."""
        step, low = _affine_grid(heads, scale_codes, low_codes)
        codes = ((x + low) * _reciprocal(step)).round().clamp(0, levels)
        return codes, (weights * (codes * step - low - x).square()).sum(dim=(1, 2))

    codes, error = choose(heads)
    refitted = _refit_affine(x, weights, codes, scale_codes, low_codes, heads)
    codes_again, error_again = choose(refitted)
    better = error_again < error
    codes = torch.where(better.view(-1, 1, 1), codes_again, codes).to(torch.uint8)
    heads = torch.where(better.unsqueeze(-1), refitted, heads)
    return pack_affine(scale_codes.to(torch.uint8), codes, low_codes.to(torch.uint8), heads, bits)


def quantize_signed(blocks: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Q6_K blocks; arguments as for `quantize_affine`."""
    x = blocks.view(-1, 16, 16)
    weights = x.square() if importance is None else importance.view_as(x)
    steps = _fit_signed(x, weights, 32, _SIGNED_SHIFTS)
    # An error of the step is multiplied by the codes, which grow with the weights.
    cost = (weights * x.square()).sum(dim=-1) * _reciprocal(steps).square()
    head = _fit_signed(steps.unsqueeze(1), cost.unsqueeze(1), 128, _SIGNED_SHIFTS)
    head = head.to(torch.float16).to(torch.float32)
    scale_codes = (steps * _reciprocal(head)).round().clamp(-128, 127)

    def choose(head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = (head * scale_codes).unsqueeze(-1)
        codes = (x * _reciprocal(step)).round().clamp(-32, 31)
        return codes, (weights * (codes * step - x).square()).sum(dim=(1, 2))

    codes, error = choose(head)
    grid = codes * scale_codes.unsqueeze(-1)
    products, squares = (
        (weights * x * grid).sum(dim=(1, 2)),
        (weights * grid * grid).sum(dim=(1, 2)),
    )
    refitted = torch.where(squares > 0, products / squares, head.squeeze(-1)).unsqueeze(-1)
    refitted = refitted.to(torch.float16).to(torch.float32)
    codes_again, error_again = choose(refitted)
    better = error_again < error
    codes = torch.where(better.view(-1, 1, 1), codes_again, codes)
    head = torch.where(better.unsqueeze(-1), refitted, head)
    return pack_signed(
        scale_codes.to(torch.int8),
        (codes + 32).to(torch.uint8).flatten(1),
        head.to(torch.float16),
    )


def _fit_affine(
    x: torch.Tensor, weights: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and offset per sub-block, `[..., runs]`, for `x ≈ step * code - offset`; neither is negative."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    low = low.clamp(max=0)
    span = high - low
    best_step = span / levels
    best_low = low
    best_error = torch.full_like(span, torch.inf)
    sum_w, sum_x = weights.sum(dim=-1, keepdim=True), (weights * x).sum(dim=-1, keepdim=True)
    from_low, inverse_span = x - low, _reciprocal(span)
    for shift in _AFFINE_SHIFTS:
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
        # A comparison with NaN is false, so sub-blocks without two different codes keep their values.
        better = (error < best_error) & (step > 0)
        best_error = torch.where(better, error, best_error)
        best_step = torch.where(better, step, best_step)
        best_low = torch.where(better, offset, best_low)
    return best_step.squeeze(-1), -best_low.squeeze(-1)


def _fit_signed(
    x: torch.Tensor, weights: torch.Tensor, middle: int, shifts: tuple[float, ...]
) -> torch.Tensor:
    """Step of each sub-block, `[..., runs]`, for `x ≈ step * code` with codes `-middle .. middle - 1`.

    The value of largest magnitude may take the code `-middle`, so a step may be negative.
    """
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    inverse = _reciprocal(largest)
    best_step, best_gain = -largest / middle, torch.zeros_like(largest)
    for shift in shifts:
        codes = (x * (-(middle + shift) * inverse)).round_().clamp_(-middle, middle - 1)
        products = (weights * x * codes).sum(dim=-1, keepdim=True)
        squares = (weights * codes * codes).sum(dim=-1, keepdim=True)
        gain = products * products / squares  # reduction of the error against all-zero codes
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_step = torch.where(better, products / squares, best_step)
    return best_step.squeeze(-1)


def _fit_positive(
    values: torch.Tensor, weights: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step for a block's sub-blocks, `[n]`, and codes `[n, runs]`: `values ≈ step * code`, all ≥ 0."""
    largest = values.amax(dim=-1, keepdim=True)
    inverse = _reciprocal(largest)
    best_step = torch.zeros_like(largest)
    best_codes = torch.zeros_like(values)
    best_error = torch.full_like(largest, torch.inf)
    for shift in _SCALE_SHIFTS:
        codes = (values * ((levels + shift) * inverse)).round().clamp(0, levels)
        squares = (weights * codes * codes).sum(dim=-1, keepdim=True)
        step = (weights * values * codes).sum(dim=-1, keepdim=True) / squares
        step = step.to(torch.float16).to(torch.float32)
        codes = (values * _reciprocal(step)).round().clamp(0, levels)
        error = (weights * (codes * step - values).square()).sum(dim=-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_step = torch.where(better, step, best_step)
        best_codes = torch.where(better, codes, best_codes)
    return best_step.squeeze(-1), best_codes


def _affine_grid(
    heads: torch.Tensor, scale_codes: torch.Tensor, low_codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and offset of each sub-block after dequantization, `[n, 8, 1]`."""
    step, low = heads.to(torch.float32).unbind(dim=-1)
    return (
        (step.unsqueeze(-1) * scale_codes).unsqueeze(-1),
        (low.unsqueeze(-1) * low_codes).unsqueeze(-1),
    )


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


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    """`1 / values`, and 0 for 0."""
    return torch.where(values == 0, 0.0, 1 / values)
