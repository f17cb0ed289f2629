"""Row-by-row sampling: the rows to sample, their counter-based noise (Philox), and the reference kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...base.errors import BadInput
from ..base.device import packed, to_device
from ..base.logits import dense_mask
from ..base.sampling_params import SamplingParams
from ..scheduling.step_plan import ScheduledRow

SCORES_AT_ONCE = 1 << 18
"""Scores of the rows that are sampled together on the host: a MiB, which caches hold."""


class SamplingRow(NamedTuple):
    """One token to sample. A named tuple, because every step builds one per row.

    Attributes:
        known: token ids so far, prompt first.
        num_prompt_tokens: length of the prompt within `known`.
        suppressed_ids: token ids masked out at this position (EOS and stop ids before `min_tokens`).
        stop_ids: EOS and stop token ids; set only with a token mask, which may allow no other token.
    """

    params: SamplingParams
    seed: int
    known: Sequence[int]
    num_prompt_tokens: int
    suppressed_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    draft_ids: Sequence[int] = ()

    @property
    def history(self) -> Sequence[int]:
        return [*self.known, *self.draft_ids] if self.draft_ids else self.known

    @property
    def position(self) -> int:
        return len(self.known) + len(self.draft_ids)


def sampling_row(
    row: ScheduledRow,
    eos_token_ids: frozenset[int],
    draft_ids: Sequence[int] = (),
    sample: int = 0,
) -> SamplingRow:
    """Sampling row of the token after a row and some draft tokens, for one of its `n` samples."""
    params = row.params
    num_output = row.end + len(draft_ids) - row.num_prompt_tokens
    suppressed: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()
    if num_output < params.min_tokens:
        suppressed = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            suppressed |= eos_token_ids
    if params.token_mask is not None:
        stop = eos_token_ids.union(params.stop_token_ids)
    seed, known = row.seed + sample, row.history
    return SamplingRow(params, seed, known, row.num_prompt_tokens, suppressed, stop, draft_ids)


def sampling_rows(row: ScheduledRow, eos_token_ids: frozenset[int]) -> list[SamplingRow]:
    return [sampling_row(row, eos_token_ids, sample=i) for i in range(row.num_samples)]


class RowwiseSampling:
    """`SamplingKernel` in torch and NumPy operations, for any device. An instance keeps its generator and
    sets the key: making one takes as long as a thousand numbers."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator, self._state = np.random.Generator(self._philox), self._philox.state

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        scores = _all_adjusted(logits, rows)
        tokens = largest(scores)
        sampled = _sampled(rows)
        num_at_once = max(1, SCORES_AT_ONCE // logits.shape[-1])
        for start in range(0, len(sampled), num_at_once):
            indices = sampled[start : start + num_at_once]
            raced = self._raced(scores[indices], [rows[i] for i in indices])
            tokens[indices] = largest(raced)
        return tokens

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        return _distributions(_all_adjusted(logits, rows), rows)

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        scores = _all_adjusted(logits, rows)
        preferences = scores.softmax(dim=-1)
        if sampled := _sampled(rows):
            weights = self._raced(scores[sampled], [rows[i] for i in sampled])
            preferences[sampled] = weights / weights.sum(dim=-1, keepdim=True)
        return preferences

    def noise(
        self, keys: Sequence[tuple[int, int]], size: int, stream: int, device: torch.device
    ) -> torch.Tensor:
        noise, state = np.empty((len(keys), size), np.float32), self._state
        for row, (seed, position) in zip(noise, keys, strict=True):
            key = np.array([seed & (2**64 - 1), position], np.uint64)
            state["state"] = {"key": key, "counter": np.array([0, 0, 0, stream], np.uint64)}
            self._philox.state = state
            self._generator.standard_exponential(dtype=np.float32, out=row)
        # Float32 can round to zero, and dividing by zero would always select the token.
        return to_device(np.maximum(noise, np.finfo(np.float32).tiny, out=noise), device)

    def _raced(self, scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Probabilities over their noise, [rows, vocab]: the largest of a row is its sample. No row is
        greedy."""
        keys = [(row.seed, row.position) for row in rows]
        return _distributions(scores, rows).div_(
            self.noise(keys, scores.shape[-1], 0, scores.device)
        )


def largest(scores: torch.Tensor) -> torch.Tensor:
    """Argmax of each row of [rows, vocab], the first among equals; NumPy's is ten times as fast on a CPU."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _ids(token_ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    """Token ids, int64, on the device of the scores; the host does not wait for the copy."""
    return packed([list(token_ids)], like.device)[0]


def _sampled(rows: Sequence[SamplingRow]) -> list[int]:
    """Indices of the rows that are not greedy."""
    return [index for index, row in enumerate(rows) if not row.params.is_greedy]


def _all_adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    if not any(row.suppressed_ids or row.params.changes_scores for row in rows):
        return logits
    scores = logits.clone()
    for index, row in enumerate(rows):
        adjust(scores[index], logits[index], row)
    return scores


def adjust(scores: torch.Tensor, logits: torch.Tensor, row: SamplingRow) -> None:
    """Apply all processing before the temperature to the scores [vocab] of one row, in place. `logits` are
    the model's unprocessed ones. BadInput: a logits processor returned another type or shape."""
    params = row.params
    if params.logit_bias:
        values = np.array(list(params.logit_bias.values()), np.float32)
        scores[_ids(params.logit_bias, scores)] += to_device(values, scores.device)
    for processor in params.logits_processors:
        result = processor(list(row.history), scores)
        if not isinstance(result, torch.Tensor) or result.shape != scores.shape:
            raise BadInput(
                f"the logits processor {processor!r} gave {getattr(result, 'shape', type(result))}: need "
                f"scores of shape {list(scores.shape)}"
            )
        scores.copy_(result)
    if params.penalizes:
        penalize(scores, row)
    if row.suppressed_ids:
        scores.index_fill_(0, _ids(row.suppressed_ids, scores), float("-inf"))
    if params.token_mask is not None:
        constrain(scores, logits, row)


def _distributions(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """softmax(scores / temperature) of each row, filtered by min-p, top-k and top-p; one-hot where greedy."""
    lowest = float("-inf")
    divisors = [[1.0 if row.params.is_greedy else row.params.temperature] for row in rows]
    scores = scores / to_device(np.array(divisors, np.float32), scores.device)
    for x, row in zip(scores, rows, strict=True):
        if row.params.is_greedy:
            best = x.argmax(dim=0, keepdim=True)
            x.fill_(lowest).index_fill_(0, best, 0.0)
        elif row.params.filters:
            ids, total = _candidates(x, row.params)
            # Stable, so that the first among equals is kept, as with argmax.
            ordered, order = x[ids].sort(descending=True, stable=True)
            keep = filter_mask(ordered, row.params, total)
            x.fill_(lowest)[ids[order]] = ordered.masked_fill(~keep, lowest)
    return scores.softmax(dim=-1)


def _candidates(
    scores: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids of the scores [vocab] that the filters can keep: sorting all would take as long as the model's
    step. Where top-p counts the others, also the log of the sum of exp of all scores less the highest."""
    total, lowest = None, float("-inf")
    if params.min_p > 0.0:
        lowest = scores.max().item() + math.log(params.min_p) - 1e-3  # less what rounding may add
    if 0 < params.top_k < len(scores):
        lowest = max(lowest, scores.topk(params.top_k).values[-1].item())
    elif params.min_p == 0.0 and params.top_p < 1.0:
        # Below, all scores together have less than what top-p leaves out.
        total = (scores - scores.max()).exp().sum(dim=0).log()
        least = math.log((1.0 - params.top_p) / (2 * len(scores)))
        lowest = scores.max().item() + total.item() + least
    return (~(scores < lowest)).nonzero()[:, 0], total


def filter_mask(
    ordered: torch.Tensor, params: SamplingParams, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Mask of the scores, sorted from high to low, that min-p, then top-k, then top-p keep.

    It keeps the first always. Top-p keeps the smallest set whose probability reaches p, of all that min-p and
    top-k keep, or of all scores with the `total` of `_candidates`, of which `ordered` are the highest.
    """
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.min_p > 0.0:
        probabilities = ordered.softmax(dim=-1)
        keep &= probabilities >= params.min_p * probabilities[0]
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1.0:
        logs = ordered.masked_fill(~keep, float("-inf"))
        probabilities = logs.softmax(dim=-1) if total is None else (logs - logs[0] - total).exp()
        before = probabilities.cumsum(dim=-1) - probabilities
        keep &= before < params.top_p
    keep[0] = True
    return keep


def constrain(scores: torch.Tensor, logits: torch.Tensor, row: SamplingRow) -> None:
    """Mask the scores [vocab] of one row by its token mask, in place.

    If no token remains, because the mask allows none or only suppressed ones, the sequence must end: its stop
    ids get the model's `logits` back.
    """
    mask = allowed(row)
    if mask is None:
        return
    lowest = float("-inf")
    scores.masked_fill_(~dense_mask(mask, len(scores), scores.device), lowest)
    stop_ids = _ids(row.stop_ids, scores)
    # Chosen on the device: the host would wait for it.
    scores[stop_ids] = torch.where((scores == lowest).all(), logits[stop_ids], scores[stop_ids])


def allowed(row: SamplingRow) -> torch.Tensor | None:
    """Token mask of a row (see `TokenMask.allowed`), if it has one."""
    if row.params.token_mask is None:
        return None
    history, end = row.history, row.num_prompt_tokens
    return row.params.token_mask.allowed(history[:end], history[end:])


def penalize(scores: torch.Tensor, row: SamplingRow) -> None:
    """Apply the penalties to the scores [vocab] of one row, in place.

    Repetition (Keskar et al., "CTRL", 2019) divides positive scores and multiplies negative ones of all
    tokens seen; frequency and presence subtract, per occurrence and once, for output tokens.
    """
    params, history = row.params, row.history
    if params.repetition_penalty != 1.0:
        seen = _ids(set(history), scores)
        values = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / factor, values * factor)
    counts = Counter(history[row.num_prompt_tokens :])
    if counts and (params.frequency_penalty or params.presence_penalty):
        times = to_device(np.array(list(counts.values()), np.float32), scores.device)
        scores[_ids(counts, scores)] -= times * params.frequency_penalty + params.presence_penalty
