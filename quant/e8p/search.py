"""Nearest points of E8P: each of 256 patterns under its best signs, whose parity costs the least channel.

For a target the best signs of a pattern are the target's own, but for one of a wrong parity, where the
channel of the least product of magnitudes is turned over. That makes 256 candidates for each of the two
shifts, exact, in place of the 65,536 points. What is left over is rounded again for 3 and 4 bits (residual
vector quantization), in units of `RESIDUAL_STEPS`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .codebook import CPU, DIM, SIGN_BITS, patterns, points, residual_points

SHIFT = 0.25
RESIDUAL_STEPS = {3: 1 / 2.04, 4: 1 / 3.45}
"""Of the residual's points, by bits (QuIP#'s `opt_resid_scale`)."""
# Operations of a GEMM in the time of a search for one weight: 116,000 to 129,000, measured.
_SEARCH = 120_000
_AT_ONCE = 2048  # targets: 2 MiB for a number of each pattern and shift


class Codes(NamedTuple):
    """Codes of vectors of 8 weights.

    Attributes:
        codes: int32 `[n]`, of E8P.
        residual: int32 `[n]`, of what that leaves over; None with 2 bits.
    """

    codes: torch.Tensor
    residual: torch.Tensor | None


def nearest(targets: torch.Tensor, bits: int) -> Codes:
    """Codes of vectors float32 `[n, 8]`: the nearest point, and the nearest one to what it leaves over."""
    codes = nearest_codes(targets)
    if bits == 2:
        return Codes(codes, None)
    rest = (targets - values_of(Codes(codes, None), 2)) / RESIDUAL_STEPS[bits]
    if bits == 4:
        return Codes(codes, nearest_codes(rest))
    table = residual_points(targets.device)
    scores = torch.addmm(-table.square().sum(dim=1), rest, table.T, alpha=2)
    return Codes(codes, scores.argmax(dim=1).to(torch.int32))


def values_of(stored: Codes, bits: int) -> torch.Tensor:
    """The values float32 `[n, 8]` of codes."""
    table = points(stored.codes.device)
    values = table[stored.codes.long() & 0xFFFF]
    if stored.residual is None:
        return values
    if bits == 3:
        table = residual_points(stored.codes.device)
    return values.add_(table[stored.residual.long() & 0xFFFF], alpha=RESIDUAL_STEPS[bits])


def search_operations(bits: int) -> float:
    """What the search for one weight takes, in multiplications and additions of a large GEMM."""
    return _SEARCH * (2 if bits == 4 else 1)


def nearest_codes(targets: torch.Tensor) -> torch.Tensor:
    """Codes int32 `[n]` of the points of E8P that are nearest to `targets`, float32 `[n, 8]`."""
    return torch.cat([_nearest_codes(part) for part in targets.split(_AT_ONCE)])


def _nearest_codes(targets: torch.Tensor) -> torch.Tensor:
    table = patterns(targets.device)
    odd = table.sum(dim=1) % 2  # of the patterns' own sums
    unshifted = torch.stack([targets - SHIFT, targets + SHIFT])
    magnitudes, minus = unshifted.abs(), unshifted < 0
    # A minus changes a sum by an odd number, and the sum must be even.
    wrong = (odd - (minus.sum(dim=-1, keepdim=True) % 2)).abs_()
    least = magnitudes[..., :1] * table[:, 0]
    for channel in range(1, DIM):
        torch.minimum(least, magnitudes[..., channel, None] * table[:, channel], out=least)
    scores = 2 * magnitudes @ table.T - table.square().sum(dim=1)
    scores.addcmul_(least, wrong, value=-4)
    best, pattern = scores.max(dim=-1)
    errors = unshifted.square().sum(dim=-1) - best
    lowered = errors[1] < errors[0]
    chosen = lowered.long()[None]
    pattern, magnitudes, minus, wrong = (
        _of_shift(part, chosen)
        for part in (pattern, magnitudes, minus, wrong.gather(-1, pattern[..., None]))
    )
    turned = (magnitudes * table[pattern]).argmin(dim=1, keepdim=True)
    minus = minus ^ torch.zeros_like(minus).scatter_(1, turned, wrong > 0)
    minus[:, DIM - 1] ^= odd[pattern] > 0
    bits = torch.tensor(SIGN_BITS, dtype=torch.int32, device=CPU).to(targets.device)
    signs = (minus.to(torch.int32) << bits).sum(dim=1, dtype=torch.int32) ^ lowered.to(torch.int32)
    return pattern.to(torch.int32) << 8 | signs


def _of_shift(both: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Of `[2, n, ...]` the one that `chosen` `[1, n]` says, for each target."""
    index = chosen.view(*chosen.shape, *(1,) * (both.dim() - 2)).expand(1, *both.shape[1:])
    return both.gather(0, index)[0]
