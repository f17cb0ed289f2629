"""From scores to tokens.

Randomness is stateless: the noise of a draw depends on the request's seed and the position of the token,
and on nothing else. So a request draws the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..quant.errors import BadInput
from .logits import LogitsProcessor, dense_mask
from .outputs import TokenLogprobs
from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One draw.

    Attributes:
        params: how to draw.
        seed: of this completion.
        history: tokens so far, prompt first.
        num_prompt_tokens: how many of them are prompt.
        barred: tokens that must not come now (what would end a sequence that is too short to end).
        endings: tokens that end the sequence; given with a token mask, which may leave nothing else.
    """

    params: SamplingParams
    seed: int
    history: Sequence[int]
    num_prompt_tokens: int
    barred: frozenset[int] = frozenset()
    endings: frozenset[int] = frozenset()


class Sampler:
    """Draws a token for each row of scores.

    What is done to the scores, in this order: logit bias, logits processors, penalties, barred tokens,
    token mask, temperature, min-p, top-k, top-p. That a token may not come is said after everything
    that could raise its score again.
    """

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Tokens for float32 `logits` [rows, vocab], and their logprobs where a row asks for them."""
        scores = self._adjusted(logits, rows)
        tokens = scores.argmax(dim=-1)
        for index, row in enumerate(rows):
            if not row.params.is_greedy:
                tokens[index] = self._sample(scores[index], row)
        drawn = tokens.tolist()
        logprobs = [
            token_logprobs(logits[index], token, row.params.logprobs)
            if row.params.logprobs is not None
            else None
            for index, (row, token) in enumerate(zip(rows, drawn, strict=True))
        ]
        return drawn, logprobs

    def _adjusted(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        if not any(row.barred or row.params.changes_scores for row in rows):
            return logits
        scores = logits.clone()
        for index, row in enumerate(rows):
            if row.params.logit_bias:
                tokens = torch.tensor(list(row.params.logit_bias), device=scores.device)
                values = list(row.params.logit_bias.values())
                scores[index, tokens] += torch.tensor(values, device=scores.device)
            for processor in row.params.logits_processors:
                scores[index] = processed(processor, row, scores[index])
            if row.params.penalizes:
                penalize(scores[index], row)
            if row.barred:
                scores[index, torch.tensor(sorted(row.barred), device=scores.device)] = float(
                    "-inf"
                )
            if row.params.token_mask is not None:
                constrain(scores[index], logits[index], row)
        return scores

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Float32 [rows, vocab]: the probabilities that `draw` draws by."""
        scores = self._adjusted(logits, rows)
        return torch.stack([_distribution(own, row) for own, row in zip(scores, rows, strict=True)])

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Float32 [rows, vocab], each row summing to 1: what `draw` would draw from scores like these.

        The token that it draws from `logits` themselves has the most. Where a row is not greedy, the
        noise of its draw is in them, which the draw from other scores shares.
        """
        scores = self._adjusted(logits, rows)
        return torch.stack([_preference(own, row) for own, row in zip(scores, rows, strict=True)])

    def _sample(self, scores: torch.Tensor, row: SamplingRow) -> int:
        return choose(_distribution(scores, row), row.seed, len(row.history))


def _distribution(scores: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """softmax(scores / temperature), narrowed by min-p, top-k and top-p; all on one token where greedy."""
    if row.params.is_greedy:
        return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1.0)
    scores = scores / row.params.temperature
    if not row.params.filters:
        return scores.softmax(dim=-1)
    # Stable, so that among equals the first stays, as with argmax.
    ordered, order = scores.sort(descending=True, stable=True)
    keep = filter_mask(ordered, row.params)
    probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(dim=-1)
    return torch.zeros_like(scores).index_copy_(0, order, probabilities)


def _preference(scores: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    if row.params.is_greedy:
        return scores.softmax(dim=-1)
    noise = exponential_noise(row.seed, len(row.history), scores.numel()).to(scores.device)
    weights = _distribution(scores, row) / noise
    return weights / weights.sum()


def choose(weights: torch.Tensor, seed: int, position: int, stream: int = 0) -> int:
    """A draw by `weights` [vocab], which need not sum to 1: argmax(w / e) with e ~ Exp(1)."""
    noise = exponential_noise(seed, position, weights.numel(), stream).to(weights.device)
    return int((weights / noise).argmax())


def filter_mask(ordered: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which of the scores, sorted from high to low, survive min-p, then top-k, then top-p.

    The first always does. Top-p keeps the smallest set whose probability reaches p.
    """
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.min_p > 0.0:
        probabilities = ordered.softmax(dim=-1)
        keep &= probabilities >= params.min_p * probabilities[0]
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1.0:
        probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        keep &= before < params.top_p
    keep[0] = True
    return keep


def processed(processor: LogitsProcessor, row: SamplingRow, scores: torch.Tensor) -> torch.Tensor:
    """What a processor makes of the scores [vocab] of one row.

    Raises:
        BadInput: something of another shape.
    """
    found = processor(list(row.history), scores)
    if not isinstance(found, torch.Tensor) or found.shape != scores.shape:
        raise BadInput(
            f"the logits processor {processor!r} gave {getattr(found, 'shape', type(found))}: need "
            f"scores of shape {list(scores.shape)}"
        )
    return found


def constrain(scores: torch.Tensor, logits: torch.Tensor, row: SamplingRow) -> None:
    """Take what the token mask of one row does not allow out of its scores [vocab], in place.

    Where nothing is left, because the mask allows nothing or only what is barred otherwise, the sequence
    can only end: the model's own `logits` choose among the tokens that end it.
    """
    assert row.params.token_mask is not None
    end = row.num_prompt_tokens
    mask = row.params.token_mask.allowed(row.history[:end], row.history[end:])
    if mask is None:
        return
    lowest = float("-inf")
    scores.masked_fill_(~dense_mask(mask, len(scores), scores.device), lowest)
    if bool((scores == lowest).all()):
        endings = torch.tensor(sorted(row.endings), device=scores.device)
        scores[endings] = logits[endings]


def penalize(scores: torch.Tensor, row: SamplingRow) -> None:
    """Apply the penalties to the scores [vocab] of one row, in place.

    Repetition (Keskar et al., "CTRL", 2019) divides positive scores and multiplies negative ones of all
    tokens seen; frequency and presence subtract, per occurrence and once, for output tokens.
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.history)), device=scores.device)
        values = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / factor, values * factor)
    counts = Counter(row.history[row.num_prompt_tokens :])
    if counts and (params.frequency_penalty or params.presence_penalty):
        tokens = torch.tensor(list(counts), device=scores.device)
        times = torch.tensor(list(counts.values()), device=scores.device, dtype=scores.dtype)
        scores[tokens] -= times * params.frequency_penalty + params.presence_penalty


def exponential_noise(seed: int, position: int, size: int, stream: int = 0) -> torch.Tensor:
    """Exp(1) noise, float32 [size], from a counter-based generator keyed by (seed, position).

    Streams of one key have nothing to do with each other.
    """
    noise = _generator(seed, position, stream).standard_exponential(size, dtype=np.float32)
    # Float32 can round to zero, and dividing by it would make the token certain.
    return torch.from_numpy(np.maximum(noise, np.finfo(np.float32).tiny))


def uniform_noise(seed: int, position: int, stream: int) -> float:
    """A number in [0, 1), keyed as above."""
    return float(_generator(seed, position, stream).random())


def _generator(seed: int, position: int, stream: int) -> np.random.Generator:
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of a token under float32 `logits` [vocab], and the `num_top` likeliest."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs[token_id]
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, tokens = logprobs.topk(min(num_top, logprobs.numel()))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(own), int((logprobs > own).sum()) + 1, top)
