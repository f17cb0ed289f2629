"""Beam search: the likeliest continuations instead of a sampled one.

A search is pure policy: from the top-k next tokens of its beams it chooses the beams to extend. The engine
computes them as requests for one token each. What a beam shares with its parent, all but the last block, is a
prefix-cache hit, so that a round computes a few tokens per beam.

The rules, of length and of stopping too, are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..quant.base.errors import BadInput
from .base.sampling_params import MAX_LOGPROBS, SamplingParams
from .engine import Engine
from .text.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search parameters. `length_penalty` and `early_stopping` are those of transformers' `generate`.

    Attributes:
        beam_width: beams that are extended, and hypotheses returned.
        max_tokens: of a hypothesis.
        length_penalty: a hypothesis scores sum of log-probabilities / length ** penalty, so that a larger
            one favours longer hypotheses.
        early_stopping: True ends the search when `beam_width` hypotheses are finished, False when no beam
            can beat the worst of them at its present length, "never" when none can at any length.
        ignore_eos: end-of-sequence tokens do not finish a hypothesis.

    Raises:
        BadInput: a value outside its range.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.beam_width < 1 or self.max_tokens < 1:
            raise BadInput(
                f"beam_width = {self.beam_width}, max_tokens = {self.max_tokens}: need 1 or more"
            )
        if self.early_stopping not in (True, False, "never"):
            raise BadInput(f'early_stopping = {self.early_stopping!r}: need True, False or "never"')


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished continuation and the sum of its log-probabilities."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation. `score` is its log-probability over length ** length penalty."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str


class BeamSearch:
    """The search for one prompt.

    Attributes:
        beams: to be extended, likeliest first; empty once the search is over.
        hypotheses: the best finished ones, best first.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self.beams: list[Beam] = [Beam()]
        self.hypotheses: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Top-k tokens of each beam that `advance` needs.

        Each beam may end in each of the EOS tokens; `beam_width` unfinished candidates must remain.
        """
        return max(2, 1 + len(self._eos)) * self._params.beam_width

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Extend each beam by its likeliest tokens, given as (token, log-probability), best first."""
        params, width = self._params, self._params.beam_width
        extended = [
            Beam((*beam.token_ids, token), beam.cumulative_logprob + logprob)
            for beam, tokens in zip(self.beams, likeliest, strict=True)
            for token, logprob in tokens
        ]
        extended.sort(key=lambda beam: beam.cumulative_logprob, reverse=True)
        del extended[self.num_candidates :]
        length = len(extended[0].token_ids)
        is_last = length == params.max_tokens
        # Only the best `beam_width` may finish; the others are there so that enough unfinished remain.
        ended = [
            self._finished(beam) for beam in extended[:width] if is_last or self._is_ended(beam)
        ]
        self.hypotheses = sorted(
            [*self.hypotheses, *ended], key=lambda hypothesis: hypothesis.score, reverse=True
        )[:width]
        self.beams = [] if is_last else [b for b in extended if not self._is_ended(b)][:width]
        if self.beams and len(self.hypotheses) == width and not self._can_improve(length):
            self.beams = []

    def _is_ended(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._eos

    def _finished(self, beam: Beam) -> Hypothesis:
        score = beam.cumulative_logprob / len(beam.token_ids) ** self._params.length_penalty
        reason = "stop" if self._is_ended(beam) else "length"
        return Hypothesis(beam.token_ids, beam.cumulative_logprob, score, reason)

    def _can_improve(self, length: int) -> bool:
        """Whether the best beam may still become better than the worst of a full set of hypotheses."""
        params = self._params
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = params.max_tokens
        best = self.beams[0].cumulative_logprob / length**params.length_penalty
        return best > self.hypotheses[-1].score


@dataclass(frozen=True, slots=True)
class BeamSearchResult:
    """A prompt and its hypotheses with their texts, best first."""

    prompt_token_ids: list[int]
    hypotheses: list[Hypothesis]
    texts: list[str]


def beam_search(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    lora: str | None = None,
) -> list[BeamSearchResult]:
    """Search for all prompts together, on an engine without other requests.

    `lora` is the name of the adapter.

    Raises:
        BadInput: a prompt that can never fit, or a width that needs more logprobs than the engine returns.
    """
    searches = [BeamSearch(params, engine.eos_token_ids) for _ in prompts]
    _check(engine, prompts, params, BeamSearch(params, engine.eos_token_ids).num_candidates)
    while any(search.beams for search in searches):
        top_tokens = _likeliest(engine, prompts, searches, lora)
        for index, search in enumerate(searches):
            if search.beams:
                names = [f"beam-{index}-{n}" for n in range(len(search.beams))]
                search.advance([top_tokens[name] for name in names])
    return [
        BeamSearchResult(
            list(prompt),
            search.hypotheses,
            [_text(engine, prompt, hypothesis.token_ids) for hypothesis in search.hypotheses],
        )
        for prompt, search in zip(prompts, searches, strict=True)
    ]


def _check(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    num_candidates: int,
) -> None:
    if num_candidates > min(MAX_LOGPROBS, engine.vocab_size):
        raise BadInput(
            f"beam_width = {params.beam_width} needs the {num_candidates} likeliest tokens of a beam: "
            f"at most {min(MAX_LOGPROBS, engine.vocab_size)} can be had"
        )
    longest = max(map(len, prompts), default=0)
    if longest + params.max_tokens > engine.scheduler.longest_sequence:
        raise BadInput(
            f"{longest} prompt tokens and {params.max_tokens} new ones exceed the longest sequence of "
            f"{engine.scheduler.longest_sequence} tokens that fits"
        )


def _likeliest(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    searches: Sequence[BeamSearch],
    lora: str | None,
) -> Mapping[str, Sequence[tuple[int, float]]]:
    """The likeliest next tokens of every beam of every search, by `beam-{search}-{beam}`."""
    top_tokens: dict[str, Sequence[tuple[int, float]]] = {}
    request_ids: list[str] = []
    try:
        for index, (prompt, search) in enumerate(zip(prompts, searches, strict=True)):
            params = SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=search.num_candidates
            )
            for number, beam in enumerate(search.beams):
                request_ids.append(f"beam-{index}-{number}")
                token_ids = [*prompt, *beam.token_ids]
                engine.add_request(request_ids[-1], token_ids, params, lora=lora)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.logprobs is not None
                top_tokens[output.request_id] = output.logprobs[0].top
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
    return top_tokens


def _text(engine: Engine, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    detokenizer = IncrementalDetokenizer(engine.tokenizer, list(prompt), skip_special_tokens=True)
    return detokenizer.feed(list(token_ids)) + detokenizer.flush()
