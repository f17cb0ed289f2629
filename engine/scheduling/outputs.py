"""Outputs of the engine: `RequestOutput` deltas per step, whole `GenerationResult`s, `EngineStats`; and their
text: incremental detokenization by whole characters, up to a stop string.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...quant.base.plain_tokenizer import PlainTokenizer
from ..base.sampling_params import SamplingParams
from .request import RequestTimes


class TokenDecoder(Protocol):
    """The decoding part of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def text_decoder(tokenizer: Any) -> TokenDecoder:
    """Fastest decoder with the results of a `tokenizer`, whose own `decode` checks the type of each id."""
    if isinstance(tokenizer, PlainTokenizer):
        return tokenizer.backend_tokenizer
    from transformers import PreTrainedTokenizerFast

    is_plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer
    return tokenizer


class IncrementalDetokenizer:
    """Text of a growing sequence: the difference of two decodings, as text depends on neighbouring tokens.
    While the end is an incomplete character, nothing is emitted."""

    NUM_CONTEXT_TOKENS = 6

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        # The end of the prompt is context: the leading space of the first word depends on it.
        self._token_ids = list(prompt_token_ids[-self.NUM_CONTEXT_TOKENS :])
        self._context = 0
        self._shown = len(self._token_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        self._token_ids.extend(token_ids)
        return self._advance(complete_only=True)

    def flush(self) -> str:
        return self._advance(complete_only=False)

    def _advance(self, *, complete_only: bool) -> str:
        before = self._decode(self._token_ids[self._context : self._shown])
        text = self._decode(self._token_ids[self._context :])
        is_cut = text.endswith("\ufffd")  # the replacement of an incomplete character
        if len(text) <= len(before) or (complete_only and is_cut):
            return ""
        self._context, self._shown = self._shown, len(self._token_ids)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Incremental search for stop strings, which holds back text that may begin one."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add a delta; returns the text to emit, and the stop string that it completes, if any."""
        if not self._stop:
            return text, None
        self._held += text
        begin, match = min(
            ((self._held.find(s), s) for s in self._stop if s in self._held),
            default=(-1, None),
        )
        if match is not None:
            shown = self._held[: begin + len(match) if self._include else begin]
            self._held = ""
            return shown, match
        end = len(self._held) - max(overlap(self._held, s) for s in self._stop)
        shown, self._held = self._held[:end], self._held[end:]
        return shown, None

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class CompletionText:
    """Detokenizes a completion, up to a stop string; without one, on the thread that reads its text."""

    hides_last = False
    """True if the last token ended the sequence and is no text, as in vLLM."""

    def __init__(
        self, decoder: TokenDecoder, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.is_deferred = not params.stop
        self._added: deque[tuple[int, Sequence[int], bool]] = deque()
        self._deltas: dict[int, str] = {}
        self._reading = threading.Lock()
        self._detokenizer = IncrementalDetokenizer(
            decoder, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int], num_tokens: int, *, is_last: bool) -> None:
        """Add the tokens of an output, which are detokenized by `delta`; `num_tokens` it has with them."""
        self._added.append((num_tokens, token_ids, is_last))

    def delta(self, num_tokens: int) -> str:
        """The new text of the output that ended with that many tokens; they may be read in any order."""
        with self._reading:
            while num_tokens not in self._deltas:
                end, token_ids, is_last = self._added.popleft()
                last = len(token_ids) - 1
                shown = [
                    self.feed(token_id, is_last=is_last and index == last)[0]
                    for index, token_id in enumerate(token_ids)
                ]
                self._deltas[end] = "".join(shown)
            return self._deltas.pop(num_tokens)

    def feed(self, token_id: int, *, is_last: bool) -> tuple[str, str | None]:
        """The text to emit after a token, and the stop string that it completes, if any."""
        self._num_tokens += 1
        delta = "" if is_last and self.hides_last else self._detokenizer.feed([token_id])
        if self._num_tokens < self._min_tokens:
            return delta, None
        if is_last:
            delta += self._detokenizer.flush()
        shown, met = self._stop.feed(delta)
        if met is None and is_last:
            shown += self._stop.flush()
        return shown, met


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability, rank (1: likeliest) and top-k of a token, before penalties, temperature."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def with_top(self, count: int) -> TokenLogprobs:
        return self if len(self.top) <= count else replace(self, top=self.top[:count])


def num_logprobs(scored: Iterable[TokenLogprobs | None] | None) -> int:
    return sum(1 + len(token.top) for token in scored or () if token)


@dataclass(slots=True)
class RequestOutput:
    """The delta that one step adds to one completion of a request; not to be changed.

    Attributes:
        text: new text, or the place to detokenize it when `new_text` is first read.
        logprobs: one entry per new token, if the request asks for them.
        prompt_logprobs: present in the first output only; None for the first token, which nothing predicts.
        finish_reason: "stop", "length" or "abort" with the last output, else None.
        stop_reason: the token id or string that stopped it; None for an end-of-sequence token.
        times: monotonic seconds (`time.perf_counter`).
        pooled: vector of a pooled prompt, float32.
    """

    request_id: str
    index: int
    new_token_ids: tuple[int, ...]
    text: str | CompletionText
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: str | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    times: RequestTimes
    pooled: tuple[float, ...] | None = None

    @property
    def new_text(self) -> str:
        """Text that can be emitted, on any thread: no unfinished character or possible stop string."""
        if not isinstance(self.text, str):
            self.text = self.text.delta(self.num_output_tokens)
        return self.text


@dataclass(slots=True)
class Completion:
    """One finished continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _unread: list[RequestOutput] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def part(cls, index: int, output: RequestOutput) -> Completion:
        scores = None if output.logprobs is None else [*output.logprobs]
        ending = output.finish_reason, output.stop_reason
        return cls(index, output.new_text, [*output.new_token_ids], scores, *ending)

    def extend(self, output: RequestOutput) -> None:
        """Append the delta of a step. The text is complete with the last one, and empty before."""
        self._unread.append(output)
        if output.finish_reason is not None:  # all at once: no step waits for it
            self.text += "".join(part.new_text for part in self._unread)
            self._unread.clear()
        self.token_ids.extend(output.new_token_ids)
        if output.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass(slots=True)
class GenerationResult:
    """A prompt and its finished completions; the properties are those of the first completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started, and gauges of this moment.

    Attributes:
        num_swaps: preemptions by swapping out, not recomputation.
        num_drafts, num_draft_tokens, num_accepted_tokens: drafts (one per sequence and step), their draft
            tokens, and the accepted ones.
        num_kept_tokens, num_evicted_tokens: tokens kept and evicted by compactions to a KV-cache budget,
            summed over all of them, also of sequences that were recomputed.
        kv_tokens_total: capacity of the KV cache in tokens.
        kv_slots_used, kv_slots_unfilled: slots in the blocks in use, a shared block counted once, and those
            of them that hold no token's keys and values yet.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_kept_tokens: int = 0
    num_evicted_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_dtype: str = ""
    kv_bytes: int = 0
    kv_tokens_total: int = 0
    kv_slots_used: int = 0
    kv_slots_unfilled: int = 0
