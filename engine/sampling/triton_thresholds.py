"""Thresholds of min-p, top-k and top-p in Triton, without a sort.

A threshold is found by multi-way bisection on the count or probability mass above it. It runs over a few
candidates of a row, which all multiprocessors have picked before: the scores above the highest of some coarse
pivots that is surely below the threshold. Kernels take float32 scores (logits) [rows, vocab] and are
batch-invariant: a row depends on that row alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..kernels.common.devices import power_of_two

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false


PIVOTS = tl.constexpr(8)
"""Candidate thresholds per pass."""
PART, COARSE_BLOCK = tl.constexpr(4096), tl.constexpr(256)
"""Tokens of a row that a program picks candidates from, and of its loop."""
COMPACT_BLOCK, BLOCK = tl.constexpr(2048), tl.constexpr(512)
"""Tokens of the loop that writes candidates, and of the loop over candidates."""
STEPS, STEP = tl.constexpr(16), tl.constexpr(1.25)
"""Coarse pivots below the highest score, and their distance: the last but one is at exp(-19) of its mass."""
MOST_CANDIDATES = 16384
"""Candidates that a row has memory for; one program searches all of a flatter row."""
_ALL = tl.constexpr(1 << 30)
_LOWEST = tl.constexpr(-2139095041)
"""The key of minus infinity."""


@triton.jit
def _key(x):
    """Order-preserving map from float32 to int32."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled_scores(row_ptr, lanes, size, temperature):
    """Scores of a row's `lanes`, scaled by the temperature; unscaled if it is 0 (greedy)."""
    x = tl.load(row_ptr + lanes, mask=lanes < size, other=float("-inf"))
    if temperature > 0.0:
        x = tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + temperature)
    return x


@triton.jit
def _is_searched(float_ptr, integer_ptr, row, size):
    """Flags of a row: top-k and top-p are searched for, and min-p, which needs no search, applies."""
    is_drawn = tl.load(float_ptr + row * 3) > 0.0
    min_p, top_p = tl.load(float_ptr + row * 3 + 1), tl.load(float_ptr + row * 3 + 2)
    top_k = tl.load(integer_ptr + row * 3 + 2)
    return (
        is_drawn & (top_k > 0) & (top_k < size),
        is_drawn & (top_p < 1.0),
        is_drawn & (min_p > 0.0),
    )


@triton.jit
def _part_tops(score_ptr, float_ptr, top_ptr, size):
    """Write the highest scaled score of each part of a row. Grid: rows, parts."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * PART + tl.arange(0, PART)
    x = scaled_scores(score_ptr + row * size, lanes, size, tl.load(float_ptr + row * 3))
    tl.store(top_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(x, 0))


@triton.jit
def _top(top_ptr, row, parts, PARTS: tl.constexpr):
    lanes = tl.arange(0, PARTS)
    tops = tl.load(top_ptr + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
    return tl.max(tops, 0)


@triton.jit
def _coarse_pivots(top):
    """Keys [STEPS] at equal distances below the top; the last is below all scores."""
    steps = tl.arange(0, STEPS)
    keys = _key(top - (steps + 1).to(tl.float32) * STEP)
    return tl.where(steps == STEPS - 1, _LOWEST, keys)


@triton.jit
def _coarse_sums(
    score_ptr, float_ptr, integer_ptr, top_ptr, count_ptr, mass_ptr, size, PARTS: tl.constexpr
):
    """Write how many tokens of a part are at or above each coarse pivot, and their mass exp(score - top).
    Grid: rows, parts."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    by_k, by_p, _ = _is_searched(float_ptr, integer_ptr, row, size)
    if by_k | by_p:
        parts = tl.num_programs(1)
        temperature = tl.load(float_ptr + row * 3)
        top = _top(top_ptr, row, parts, PARTS)
        pivots = _coarse_pivots(top)
        counts = tl.zeros([STEPS, COARSE_BLOCK], tl.int32)
        masses = tl.zeros([STEPS, COARSE_BLOCK], tl.float32)
        for begin in range(part * PART, tl.minimum((part + 1) * PART, size), COARSE_BLOCK):
            lanes = begin + tl.arange(0, COARSE_BLOCK)
            x = scaled_scores(score_ptr + row * size, lanes, size, temperature)
            stays = (_key(x)[None, :] >= pivots[:, None]) & (lanes < size)[None, :]
            counts += stays.to(tl.int32)
            masses += tl.where(stays, tl.exp(x - top)[None, :], 0.0)
        offset = (row * parts + part) * STEPS + tl.arange(0, STEPS)
        tl.store(count_ptr + offset, tl.sum(counts, 1))
        tl.store(mass_ptr + offset, tl.sum(masses, 1))


@triton.jit
def _compact(
    score_ptr,
    float_ptr,
    integer_ptr,
    top_ptr,
    count_ptr,
    mass_ptr,
    value_ptr,
    token_ptr,
    held_ptr,
    total_ptr,
    size,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write the candidates of a row in the order of their ids: scaled scores at or above the highest coarse
    pivot that surely is below the threshold. Grid: rows, parts.

    `held_ptr` [rows]: how many there are, of which none is written beyond `MOST`; `total_ptr` [rows]: the
    mass of the whole row.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    by_k, by_p, by_min_p = _is_searched(float_ptr, integer_ptr, row, size)
    if by_k | by_p:
        parts = tl.num_programs(1)
        temperature = tl.load(float_ptr + row * 3)
        top = _top(top_ptr, row, parts, PARTS)
        pivots = _coarse_pivots(top)
        steps, numbers = tl.arange(0, STEPS), tl.arange(0, PARTS)
        offset = (row * parts + numbers[:, None]) * STEPS + steps[None, :]
        is_part = (numbers < parts)[:, None]
        counts = tl.load(count_ptr + offset, mask=is_part, other=0)
        masses = tl.sum(tl.load(mass_ptr + offset, mask=is_part, other=0.0), 0)
        total = tl.max(masses, 0)
        # A margin for the last bits of sums in another order.
        is_below = masses >= tl.load(float_ptr + row * 3 + 2) * total * 1.001
        if by_k:
            is_below = tl.sum(counts, 0) >= tl.load(integer_ptr + row * 3 + 2)
        elif by_min_p:
            is_below &= pivots <= _key(top + tl.log(tl.load(float_ptr + row * 3 + 1)))
        chosen = tl.min(tl.where(is_below, steps, STEPS - 1), 0)
        pivot = tl.min(tl.where(steps == chosen, pivots, 2147483647), 0)
        of_parts = tl.sum(tl.where((steps == chosen)[None, :], counts, 0), 1)
        mass = tl.sum(of_parts, 0)
        if part == 0:
            tl.store(held_ptr + row, mass)
            tl.store(total_ptr + row, total)
        if mass <= MOST:
            at = row * MOST + tl.sum(tl.where(numbers < part, of_parts, 0), 0)
            for begin in range(part * PART, tl.minimum((part + 1) * PART, size), COMPACT_BLOCK):
                lanes = begin + tl.arange(0, COMPACT_BLOCK)
                x = scaled_scores(score_ptr + row * size, lanes, size, temperature)
                stays = (_key(x) >= pivot) & (lanes < size)
                places = at + tl.cumsum(stays.to(tl.int32), 0) - 1
                tl.store(value_ptr + places, x, mask=stays)
                tl.store(token_ptr + places, lanes, mask=stays)
                at += tl.sum(stays.to(tl.int32), 0)


@triton.jit
def _above(row_ptr, size, temperature, top, pivots, BY_MASS: tl.constexpr):
    """The number of tokens with keys above each pivot, or their mass exp(score - top); float32 [PIVOTS]."""
    sums = tl.full([PIVOTS, BLOCK], 0.0, tl.float32)
    for begin in range(0, size, BLOCK):
        x = scaled_scores(row_ptr, begin + tl.arange(0, BLOCK), size, temperature)
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if BY_MASS:
            weight = tl.exp(x - top)
        is_above = _key(x)[None, :].to(tl.int64) > pivots[:, None]
        sums += tl.where(is_above, weight[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _search(row_ptr, size, temperature, top, lowest, target, BY_MASS: tl.constexpr):
    """The least key >= `lowest` with less than `target` (count or mass) above it, and what is above it."""
    low = lowest
    high = _key(top).to(tl.int64)
    above = top * 0.0
    ways = tl.arange(0, PIVOTS)
    while low < high:
        step = (high - low + PIVOTS) // PIVOTS
        pivots = tl.minimum(low + (ways + 1) * step - 1, high)
        sums = _above(row_ptr, size, temperature, top, pivots, BY_MASS)
        # Nothing is above the highest pivot, so at least one pivot is under the target.
        passed = tl.sum((sums >= target).to(tl.int32), 0)
        above = tl.sum(tl.where(ways == passed, sums, 0.0), 0)
        high = tl.minimum(low + (passed + 1) * step - 1, high)
        low = low + passed * step
    return high, above


@triton.jit
def _cut_by_mass(row_ptr, size, temperature, top, at, quota, top_p, total, is_cut):
    """Top-p of the tokens above key `at`, and `quota` of its equals: the key and quota of what stays.

    `total`: the mass of the row; `is_cut`: it is not the mass of these tokens, which is summed first.
    """
    if is_cut:
        # The mass above the threshold, and the mass at or above it.
        ways = tl.arange(0, PIVOTS)
        both = _above(row_ptr, size, temperature, top, at - ways, True)
        above = tl.sum(tl.where(ways == 0, both, 0.0), 0)
        with_it = tl.sum(tl.where(ways == 1, both, 0.0), 0)
        mass = tl.exp(_value(at.to(tl.int32)) - top)
        total = tl.minimum(above + quota * mass, with_it)
    target = top_p * total
    key, above = _search(row_ptr, size, temperature, top, at, target, True)
    mass = tl.exp(_value(key.to(tl.int32)) - top)
    left = tl.where(mass > 0.0, tl.ceil((target - above) / mass), 1.0 * _ALL)
    left = tl.maximum(left, 1.0)
    return key, tl.where(key > at, left, tl.minimum(quota, left))


@triton.jit
def _last_of_equals(row_ptr, token_ptr, size, temperature, at, quota, last, is_compact):
    """The token id of number `quota` of those with key `at`; `last`: there are no more than that.

    `is_compact`: tokens are candidates, whose ids `token_ptr` has.
    """
    seen = last * 0
    beyond = last
    for begin in range(0, size, BLOCK):
        lanes = begin + tl.arange(0, BLOCK)
        x = scaled_scores(row_ptr, lanes, size, temperature)
        is_equal = (_key(x).to(tl.int64) == at) & (lanes < size)
        rank = seen + tl.cumsum(is_equal.to(tl.int32), 0)
        is_last = is_equal & (rank.to(tl.float32) == quota)
        tokens = lanes
        if is_compact:
            tokens = tl.load(token_ptr + lanes, mask=is_last, other=0)
        last = tl.minimum(last, tl.min(tl.where(is_last, tokens, beyond), 0))
        seen += tl.sum(is_equal.to(tl.int32), 0)
    return last


@triton.jit
def _narrow(
    score_ptr,
    float_ptr,
    integer_ptr,
    top_ptr,
    value_ptr,
    token_ptr,
    held_ptr,
    total_ptr,
    threshold_ptr,
    last_ptr,
    size,
    parts,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Apply min-p, then top-k, then top-p to a row's candidates: writes `threshold` and `last`. Grid: rows.

    A token is kept if its scaled score is above the threshold, or equals it and the token id is at most
    `last`: ties are broken by token id, as in a stable sort. Of a row with more candidates than `MOST` the
    scores themselves are searched.
    """
    row = tl.program_id(0).to(tl.int64)
    min_p = tl.load(float_ptr + row * 3 + 1)
    top_p = tl.load(float_ptr + row * 3 + 2)
    top_k = tl.load(integer_ptr + row * 3 + 2)
    by_k, by_p, by_min_p = _is_searched(float_ptr, integer_ptr, row, size)
    top = _top(top_ptr, row, parts, PARTS)
    at = row * 0 + _LOWEST
    quota = top_p * 0.0 + _ALL
    last = row * 0 - 1
    if (by_k | by_p | by_min_p) & (top > float("-inf")):
        last = row * 0 + size
        if by_min_p:
            at = _key(top + tl.log(min_p)).to(tl.int64)
        if by_k | by_p:
            mass, total = tl.load(held_ptr + row), tl.load(total_ptr + row)
            is_compact = mass <= MOST
            row_ptr = score_ptr + row * size
            temperature = tl.load(float_ptr + row * 3)
            count = size
            if is_compact:
                row_ptr = value_ptr + row * MOST
                temperature = temperature * 0.0 + 1.0
                count = mass
            if by_k:
                target = top_k.to(tl.float32)
                key, above = _search(row_ptr, count, temperature, top, at, target, False)
                quota = tl.where(key > at, target - above, tl.minimum(quota, target - above))
                at = key
            if by_p:
                cut = by_k | by_min_p
                at, quota = _cut_by_mass(
                    row_ptr, count, temperature, top, at, quota, top_p, total, cut
                )
            tokens_ptr = token_ptr + row * MOST
            last = _last_of_equals(
                row_ptr, tokens_ptr, count, temperature, at, quota, last, is_compact
            )
    tl.store(threshold_ptr + row, _value(at.to(tl.int32)))
    tl.store(last_ptr + row, last)


def thresholds(
    scores: torch.Tensor, floats: torch.Tensor, integers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Min-p, top-k and top-p thresholds of each row, without a sort.

    Returns:
        Threshold, float32 [rows]: scaled scores above it are kept; and last token id, int64 [rows]: of
        the tokens at the threshold, those up to it are kept.

    Args:
        scores: float32 [rows, vocab], contiguous.
        floats: float32 [rows, 3]: temperature (0: greedy), min-p, top-p.
        integers: int64 [rows, 3]: seed, position, top-k (0: off).
    """
    rows, size = scores.shape
    parts, most = -(-size // PART.value), min(MOST_CANDIDATES, power_of_two(size))
    threshold, last = floats.new_empty(rows), integers.new_empty(rows)
    tops, masses = floats.new_empty(rows, parts), floats.new_empty(rows, parts, STEPS.value)
    counts = torch.empty(rows, parts, STEPS.value, dtype=torch.int32, device=scores.device)
    values, totals = floats.new_empty(rows, most), floats.new_empty(rows)
    tokens = torch.empty(rows, most, dtype=torch.int32, device=scores.device)
    mass = torch.empty(rows, dtype=torch.int32, device=scores.device)
    given, candidates = (scores, floats, integers, tops), (values, tokens, mass, totals)
    grid, sizes = (rows, parts), dict[str, Any](PARTS=power_of_two(parts), num_warps=8)
    _part_tops[grid](scores, floats, tops, size, num_warps=8)
    _coarse_sums[grid](*given, counts, masses, size, **sizes)
    sizes["MOST"] = most
    _compact[grid](*given, counts, masses, *candidates, size, **sizes)
    _narrow[(rows,)](*given, *candidates, threshold, last, size, parts, **sizes)
    return threshold, last
