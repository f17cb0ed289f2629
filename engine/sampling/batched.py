"""Batched sampling: all rows at once, in Triton kernels, without host synchronisation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..base.device import to_device
from ..base.logits import packed_mask
from ..scheduling.request import TokenView
from . import triton_sampling as kernels
from .rowwise import SamplingRow, adjust, allowed
from .triton_thresholds import thresholds


class BatchedSampling:
    """A `SamplingKernel` in Triton kernels; rows with logits processors are processed row by row."""

    def __init__(self) -> None:
        self._counts = TokenCounts()

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        scores = self._adjusted(logits.contiguous(), rows)
        if all(row.params.is_greedy for row in rows):
            return scores.argmax(dim=-1)
        floats, integers = _settings(rows, scores.device)
        return kernels.draw(scores, floats, integers, *thresholds(scores, floats, integers))

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
        return kernels.exponential(_integers(wrapped, device), size, stream)

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
        _constrain(scores, logits, together)
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
        kernels.penalize(scores, of_rows, counts, table_rows, _floats(penalties, scores.device))


def _constrain(
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
    kernels.constrain(
        scores, logits, of_rows, to_device(words, scores.device), to_device(stop_ids, scores.device)
    )


def _settings(
    rows: Sequence[SamplingRow], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel parameters per row: (temperature, min-p, top-p) and (seed, position, top-k)."""
    floats, integers = [], []
    for row in rows:
        params = row.params
        temperature = 0.0 if params.is_greedy else params.temperature
        floats.append((temperature, params.min_p, params.top_p))
        integers.append((_wrapped(row.seed), row.position, max(0, params.top_k)))
    return _floats(floats, device), _integers(integers, device)


def _wrapped(seed: int) -> int:
    """The low 64 bits of a seed, as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63


def _greedy(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    """Flags of the greedy rows, bool [rows, 1]."""
    return to_device(np.array([[row.params.is_greedy] for row in rows]), device)


def _floats(values: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.float32), device)


def _integers(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def _flat_indices(pairs: Sequence[tuple[int, int]], scores: torch.Tensor) -> torch.Tensor:
    """Flat indices of (row, token) pairs in `scores` [rows, vocab]."""
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
