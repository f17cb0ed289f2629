"""Sampling in Triton: the Gumbel-max trick on what the thresholds leave, penalties, and token masks.

All kernels take float32 scores (logits) [rows, vocab] and are batch-invariant: a row depends on that row
alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_thresholds import scaled_scores

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false


BLOCK, PART = tl.constexpr(2048), tl.constexpr(16384)
"""Tokens of a loop, and of a row that one program samples from; the row's token is the best of its parts."""
LEAST_STOP_IDS = 32
"""Stop ids that a program holds, or more: few requests have more, which compile a kernel of their own."""


@triton.jit
def _noise(seed, position, stream, lanes):
    """Exp(1) noise of a row's `lanes`: Philox keyed by the seed, counter (token, position, stream).

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), Philox4x32-10.
    """
    token = lanes.to(tl.uint32)
    place = (lanes * 0 + position).to(tl.uint32)
    which = (lanes * 0 + stream).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, token, place, which, token * 0)
    # In [2^-33, 1): neither the logarithm nor a division by the noise overflows.
    uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # Near 0, 1 - u would round away the bits that decide the race among many tokens.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333))
    return tl.where(uniform < 0.001, series, -tl.log(1.0 - uniform))


@triton.jit(do_not_specialize=["size", "stream"])
def _exponential(key_ptr, out_ptr, size, stream):
    """Write Exp(1) noise. Grid: rows, blocks of a row; `key_ptr` int64 [rows, 2]: seed, position."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed, position = tl.load(key_ptr + row * 2), tl.load(key_ptr + row * 2 + 1)
    noise = _noise(seed, position, stream, lanes)
    tl.store(out_ptr + row * size + lanes, noise, mask=lanes < size)


@triton.jit
def _draw(
    score_ptr,
    float_ptr,
    integer_ptr,
    threshold_ptr,
    last_ptr,
    best_ptr,
    token_ptr,
    size,
):
    """Sample a token from each part of a row, by an exponential race: argmax(p / e). Grid: rows, parts.

    With Exp(1) noise e that is argmax(score - log e) over the kept tokens (Gumbel-max); greedy without
    temperature.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(float_ptr + row * 3)
    seed = tl.load(integer_ptr + row * 3)
    position = tl.load(integer_ptr + row * 3 + 1)
    threshold, last = tl.load(threshold_ptr + row), tl.load(last_ptr + row)
    first = tl.program_id(1) * PART
    best = temperature * 0.0 - float("inf")
    token = first
    for begin in range(first, tl.minimum(first + PART, size), BLOCK):
        lanes = begin + tl.arange(0, BLOCK)
        x = scaled_scores(score_ptr + row * size, lanes, size, temperature)
        if temperature > 0.0:
            stays = (x > threshold) | ((x == threshold) & (lanes <= last))
            x = tl.where(stays, x - tl.log(_noise(seed, position, 0, lanes)), float("-inf"))
        highest = tl.max(x, 0)
        if highest > best:
            best = highest
            token = begin + tl.argmax(x, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + place, best)
    tl.store(token_ptr + place, token.to(tl.int64))


@triton.jit
def _penalize(score_ptr, row_ptr, count_ptr, place_ptr, penalty_ptr, size):
    """Apply repetition, frequency and presence penalties in place. Grid: penalized rows, blocks of a row.

    `row_ptr` holds the rows of the scores, `place_ptr` the rows of the token counts: twice the occurrences
    in the output, plus one where a token is in the prompt. `penalty_ptr` [rows, 3]: repetition, frequency,
    presence.
    """
    index = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < size
    scores = score_ptr + tl.load(row_ptr + index) * size + lanes
    counts = count_ptr + tl.load(place_ptr + index) * size + lanes
    repetition = tl.load(penalty_ptr + index * 3)
    frequency = tl.load(penalty_ptr + index * 3 + 1)
    presence = tl.load(penalty_ptr + index * 3 + 2)
    count = tl.load(counts, mask=mask, other=0)
    x = tl.load(scores, mask=mask, other=0.0)
    factor = tl.full([BLOCK], 0.0, tl.float32) + repetition
    x = tl.where(count > 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    times = count >> 1
    x = tl.where(times > 0, x - (times.to(tl.float32) * frequency + presence), x)
    tl.store(scores, x, mask=mask)


@triton.jit(do_not_specialize=["stop_ids"])
def _constrain(
    score_ptr,
    logit_ptr,
    row_ptr,
    word_ptr,
    stop_id_ptr,
    size,
    words,
    stop_ids,
    STOP_IDS: tl.constexpr,
):
    """Apply packed token bitmasks (grammars) to scores, in place. Grid: masked rows.

    Where no token is left, the logits of the stop ids are restored. `word_ptr` int32 [rows, words];
    `stop_id_ptr` int64 [rows, stop_ids], padded with -1.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + index)
    left = tl.full([BLOCK], 0, tl.int32)
    for begin in range(0, size, BLOCK):
        lanes = begin + tl.arange(0, BLOCK)
        mask = lanes < size
        word = tl.load(word_ptr + index * words + lanes // 32, mask=mask, other=0)
        x = tl.load(score_ptr + row * size + lanes, mask=mask, other=float("-inf"))
        x = tl.where(((word >> (lanes % 32)) & 1) != 0, x, float("-inf"))
        tl.store(score_ptr + row * size + lanes, x, mask=mask)
        left = left | (x != float("-inf")).to(tl.int32)
    nothing = tl.max(left, 0) == 0
    tl.debug_barrier()
    if nothing:
        lanes = tl.arange(0, STOP_IDS)
        token = tl.load(stop_id_ptr + index * stop_ids + lanes, mask=lanes < stop_ids, other=-1)
        is_token = token >= 0
        x = tl.load(logit_ptr + row * size + token, mask=is_token, other=0.0)
        tl.store(score_ptr + row * size + token, x, mask=is_token)


def draw(
    scores: torch.Tensor,
    floats: torch.Tensor,
    integers: torch.Tensor,
    threshold: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Sample a token per row, int64 [rows]; arguments as of `thresholds`, and its results."""
    rows, size = scores.shape
    parts = -(-size // PART.value)
    best, tokens = floats.new_empty(rows, parts), integers.new_empty(rows, parts)
    given = scores, floats, integers, threshold, last
    _draw[(rows, parts)](*given, best, tokens, size, num_warps=8)
    return tokens.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)


def exponential(keys: torch.Tensor, size: int, stream: int) -> torch.Tensor:
    """Exp(1) noise, float32 [rows, size], for int64 `keys` [rows, 2]: seed, position."""
    out = torch.empty(len(keys), size, device=keys.device)
    _exponential[(len(keys), -(-size // BLOCK.value))](keys, out, size, stream, num_warps=8)
    return out


def penalize(
    scores: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    places: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Apply penalties to some rows of `scores`, in place.

    Args:
        scores: float32 [rows, vocab], contiguous.
        rows, places: int64 [penalized], rows of `scores` and of `counts`.
        counts: int32 [slots, vocab], twice the occurrences in the output, plus one for tokens of the prompt.
        penalties: float32 [penalized, 3]: repetition, frequency, presence.
    """
    size = scores.shape[1]
    grid = len(rows), -(-size // BLOCK.value)
    _penalize[grid](scores, rows, counts, places, penalties, size, num_warps=8)


def constrain(
    scores: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    stop_ids: torch.Tensor,
) -> None:
    """Apply token bitmasks to some rows of `scores`, in place.

    Args:
        scores, logits: float32 [rows, vocab], contiguous; `logits` are the model's raw logits.
        rows: int64 [masked].
        words: int32 [masked, ceil(vocab / 32)]; bit i % 32 of word i // 32 is set where token i is allowed.
        stop_ids: int64 [masked, stop_ids], padded with -1: restored where no token is left.
    """
    given, sizes = (scores, logits, rows, words, stop_ids), (scores, words, stop_ids)
    most = triton.next_power_of_2(max(LEAST_STOP_IDS, stop_ids.shape[1]))
    _constrain[(len(rows),)](*given, *(x.shape[1] for x in sizes), STOP_IDS=most, num_warps=8)
