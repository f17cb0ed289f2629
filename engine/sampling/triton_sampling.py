"""Sampling of all rows at once in Triton kernels, without host synchronisation.

The Gumbel-max trick on the tokens that the thresholds keep, penalties, and token masks. All kernels take
float32 scores (logits) [rows, vocab] and are batch-invariant: a row depends on that row alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from ..base.device import to_device
from ..base.logits import packed_mask
from ..scheduling.request import TokenView
from .rowwise import SamplingRow, adjust, allowed
from .triton_thresholds import scaled_scores, thresholds

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
    counter = (lanes * 0 + position).to(tl.uint32)
    which = (lanes * 0 + stream).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, token, counter, which, token * 0)
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
def _draw(score_ptr, float_ptr, integer_ptr, threshold_ptr, last_ptr, best_ptr, token_ptr, size):
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
    offset = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + offset, best)
    tl.store(token_ptr + offset, token.to(tl.int64))


@triton.jit
def _penalize(score_ptr, row_ptr, count_ptr, place_ptr, penalty_ptr, size):
    """Apply repetition, frequency and presence penalties in place. Grid: penalized rows, blocks of a row.

    `row_ptr` has the rows of the scores, `place_ptr` the rows of the token counts [slots, vocab]: twice the
    occurrences in the output, plus one where a token is in the prompt. `penalty_ptr` [rows, 3]: repetition,
    frequency, presence.
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

    Where no token is left, the model's raw logits of the stop ids are restored. `row_ptr` int64 [rows]: rows
    of the scores; `word_ptr` int32 [rows, words]; `stop_id_ptr` int64 [rows, stop_ids], padded with -1.
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
    """Apply penalties to some rows of `scores` [rows, vocab], contiguous, in place; arguments as of
    `_penalize`: rows and places int64, `counts` int32, penalties float32."""
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
    """Apply token bitmasks to some rows of `scores` [rows, vocab], contiguous, in place; arguments as of
    `_constrain`: bit i % 32 of word i // 32 is set where token i is allowed."""
    given, sizes = (scores, logits, rows, words, stop_ids), (scores, words, stop_ids)
    most = triton.next_power_of_2(max(LEAST_STOP_IDS, stop_ids.shape[1]))
    _constrain[(len(rows),)](*given, *(x.shape[1] for x in sizes), STOP_IDS=most, num_warps=8)


class BatchedSampling:
    """A `SamplingKernel` in Triton kernels; rows with logits processors are processed row by row."""

    def __init__(self) -> None:
        self._counts = TokenCounts()

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        scores = self._adjusted(logits.contiguous(), rows)
        if all(row.params.is_greedy for row in rows):
            return scores.argmax(dim=-1)
        floats, integers = _settings(rows, scores.device)
        return draw(scores, floats, integers, *thresholds(scores, floats, integers))

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        scores = self._adjusted(logits.contiguous(), rows)
        one_hot = torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)
        return self._probabilities(scores, rows, one_hot)

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        scores = self._adjusted(logits.contiguous(), rows)
        weights = self._probabilities(scores, rows, scores.softmax(dim=-1))
        keys = [(row.seed, row.position) for row in rows]
        greedy = _greedy(rows, scores.device)
        noise = self.noise(keys, scores.shape[1], 0, scores.device).masked_fill_(greedy, 1.0)
        weights = weights / noise
        return weights / weights.sum(dim=-1, keepdim=True)

    def noise(
        self, keys: Sequence[tuple[int, int]], size: int, stream: int, device: torch.device
    ) -> torch.Tensor:
        wrapped = [(_wrapped(seed), position) for seed, position in keys]
        return exponential(_integers(wrapped, device), size, stream)

    def _probabilities(
        self, scores: torch.Tensor, rows: Sequence[SamplingRow], greedy: torch.Tensor
    ) -> torch.Tensor:
        """Sampling probabilities; greedy rows take theirs from `greedy` [rows, vocab]."""
        floats, integers = _settings(rows, scores.device)
        threshold, last = thresholds(scores, floats, integers)
        is_greedy = _greedy(rows, scores.device)
        scaled = scores / floats[:, :1].masked_fill(is_greedy, 1.0)
        tokens = torch.arange(scores.shape[1], device=scores.device)
        at, last = threshold[:, None], last[:, None]
        kept = (scaled > at) | ((scaled == at) & (tokens <= last))
        weights = scaled.masked_fill_(~kept, float("-inf")).softmax(dim=-1)
        return torch.where(is_greedy, greedy, weights)

    def _adjusted(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        if not any(row.suppressed_ids or row.params.changes_scores for row in rows):
            return logits
        scores = logits.clone()
        together: list[tuple[int, SamplingRow]] = []
        for index, row in enumerate(rows):
            if row.params.logits_processors:
                adjust(scores[index], logits[index], row)
            else:
                together.append((index, row))
        biased = [
            (i, *pair) for i, row in together for pair in (row.params.logit_bias or {}).items()
        ]
        if biased:
            indices = _flat_indices([(i, token) for i, token, _ in biased], scores)
            bias = to_device(np.array([value for _, _, value in biased], np.float32), scores.device)
            scores.view(-1).index_add_(0, indices, bias)
        self._penalize(scores, [(i, row) for i, row in together if row.params.penalizes])
        suppressed = [(i, token) for i, row in together for token in row.suppressed_ids]
        if suppressed:
            scores.view(-1).index_fill_(0, _flat_indices(suppressed, scores), float("-inf"))
        _mask_rows(scores, logits, together)
        return scores

    def _penalize(self, scores: torch.Tensor, rows: Sequence[tuple[int, SamplingRow]]) -> None:
        if not rows:
            return
        counts, table_rows = self._counts.of(
            [row for _, row in rows], scores.shape[1], scores.device
        )
        penalties = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for p in (row.params for _, row in rows)
        ]
        of_rows = _integers([index for index, _ in rows], scores.device)
        penalize(scores, of_rows, counts, table_rows, _floats(penalties, scores.device))


def _mask_rows(
    scores: torch.Tensor, logits: torch.Tensor, rows: Iterable[tuple[int, SamplingRow]]
) -> None:
    masked = [(index, row, mask) for index, row in rows if (mask := allowed(row)) is not None]
    if not masked:
        return
    words = np.stack([packed_mask(mask, scores.shape[1]) for _, _, mask in masked])
    width = max(1, *(len(row.stop_ids) for _, row, _ in masked))
    stop_ids = np.full((len(masked), width), -1, dtype=np.int64)
    for ids, (_, row, _) in zip(stop_ids, masked, strict=True):
        ids[: len(row.stop_ids)] = sorted(row.stop_ids)
    of_rows = _integers([index for index, _, _ in masked], scores.device)
    constrain(
        scores, logits, of_rows, to_device(words, scores.device), to_device(stop_ids, scores.device)
    )


def _settings(
    rows: Sequence[SamplingRow], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel parameters per row: (temperature, min-p, top-p) and (seed, position, top-k)."""
    floats, integers = [], []
    for row in rows:
        params = row.params
        floats.append((0.0 if params.is_greedy else params.temperature, params.min_p, params.top_p))
        integers.append((_wrapped(row.seed), row.position, max(0, params.top_k)))
    return _floats(floats, device), _integers(integers, device)


def _wrapped(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _greedy(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return to_device(np.array([[row.params.is_greedy] for row in rows]), device)


def _floats(values: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.float32), device)


def _integers(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def _flat_indices(pairs: Sequence[tuple[int, int]], scores: torch.Tensor) -> torch.Tensor:
    size = scores.shape[1]
    return _integers([row * size + token for row, token in pairs], scores.device)


IN_PROMPT, IN_OUTPUT = 1, 2
"""Added to a count by a prompt token (once), and by each occurrence in the output."""


@dataclass(slots=True)
class _Counted:
    """Table row of a sequence, and how many of its tokens are counted."""

    tokens: Sequence[int]
    table_row: int
    num_prompt_tokens: int
    length: int = 0


class TokenCounts:
    """Table of token counts with a row for each penalized sequence; each step adds the new tokens.

    A sequence is identified by its list of tokens, which only grows. The least recently used row is reused.
    """

    def __init__(self) -> None:
        self._table = torch.empty(0, 0, dtype=torch.int32)
        self._entries: OrderedDict[int, _Counted] = OrderedDict()

    def of(
        self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts, int32 [table rows, vocab], and the table row of each sampling row, int64 [rows]."""
        self._ensure_capacity(len({id(_tokens_of(row)) for row in rows}), vocab_size, device)
        table_rows = [self._counted(row).table_row for row in rows]
        fresh: dict[int, None] = {}
        of_prompt: list[int] = []
        of_output: list[int] = []
        for row, table_row in zip(rows, table_rows, strict=True):
            entry = self._entries[id(_tokens_of(row))]
            if not entry.length:
                fresh[table_row] = None
                prompt = row.known[: row.num_prompt_tokens]
                of_prompt += [table_row * vocab_size + token for token in prompt]
                entry.length = len(prompt)
            new = row.known[entry.length :]
            of_output += [table_row * vocab_size + token for token in new]
            entry.length += len(new)
        if fresh:
            self._table.index_fill_(0, _integers(list(fresh), device), 0)
        flat = self._table.view(-1)
        if of_prompt:
            flat.index_fill_(0, _integers(of_prompt, device), IN_PROMPT)
        _add(flat, of_output, device)
        if not any(row.draft_ids for row in rows):
            return self._table, _integers(table_rows, device)
        counts = self._table.index_select(0, _integers(table_rows, device))
        drafts = [i * vocab_size + token for i, row in enumerate(rows) for token in row.draft_ids]
        _add(counts.view(-1), drafts, device)
        return counts, torch.arange(len(rows), device=device)

    def _ensure_capacity(self, count: int, vocab_size: int, device: torch.device) -> None:
        table = self._table
        if table.device != device or table.shape[1] != vocab_size:
            self._entries.clear()
            table = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        if len(table) < count:
            wider = table.new_zeros(1 << (count - 1).bit_length(), vocab_size)
            wider[: len(table)] = table
            table = wider
        self._table = table

    def _counted(self, row: SamplingRow) -> _Counted:
        """The entry of the row's sequence; assigns a table row to a new one."""
        tokens = _tokens_of(row)
        entry = self._entries.get(id(tokens))
        if entry is None:
            table_row = len(self._entries)
            if table_row == len(self._table):
                table_row = self._entries.popitem(last=False)[1].table_row
            entry = self._entries[id(tokens)] = _Counted(tokens, table_row, row.num_prompt_tokens)
        elif entry.length > len(row.known) or entry.num_prompt_tokens != row.num_prompt_tokens:
            entry.length, entry.num_prompt_tokens = 0, row.num_prompt_tokens
        self._entries.move_to_end(id(tokens))
        return entry


def _tokens_of(row: SamplingRow) -> Sequence[int]:
    return row.known.booked if isinstance(row.known, TokenView) else row.known


def _add(flat: torch.Tensor, indices: Sequence[int], device: torch.device) -> None:
    if indices:
        twos = torch.full((len(indices),), IN_OUTPUT, dtype=torch.int32, device=device)
        flat.index_add_(0, _integers(indices, device), twos)
