"""Outputs of the engine: `RequestOutput` deltas per step, whole `GenerationResult`s, `EngineStats`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .detokenizer import CompletionText
from .request import RequestTimes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of a token, its rank (1 is the likeliest), and the top-k tokens.

    They come from the model's own distribution, before penalties, bias and temperature.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def with_top(self, count: int) -> TokenLogprobs:
        """With no more than the `count` likeliest tokens."""
        return self if len(self.top) <= count else replace(self, top=self.top[:count])


@dataclass(slots=True)
class RequestOutput:
    """The delta that one step adds to one completion of a request; not to be changed.

    Attributes:
        text: its new text, or where that is detokenized when `new_text` is first read.
        logprobs: one entry per new token, if the request asks for them.
        prompt_logprobs: with the first output only; None for the first token, which nothing predicts.
        finish_reason: "stop", "length" or "abort" with the last output, else None.
        stop_reason: the token id or string that stopped it; None for an end-of-sequence token.
        times: monotonic seconds (`time.perf_counter`).
        pooled: of a pooled prompt its vector, float32.
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
        """Text that can be emitted; shorter than the tokens' text while a character or a possible stop string
        is unfinished. Any thread may read it."""
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
        """The delta of a step alone, with its text."""
        scores = None if output.logprobs is None else [*output.logprobs]
        ending = output.finish_reason, output.stop_reason
        return cls(index, output.new_text, [*output.new_token_ids], scores, *ending)

    def extend(self, output: RequestOutput) -> None:
        """Append the delta of a step. The text is complete with the last one, and empty before."""
        self._unread.append(output)
        if output.finish_reason is not None:  # all at once: no step waits for it
            self.text += "".join(each.new_text for each in self._unread)
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
        num_kept_tokens, num_evicted_tokens: of sequences that were compacted to a KV-cache budget, summed
            over compactions, those of recomputed sequences too.
        kv_dtype, kv_bytes: data type and size of the KV cache.
        kv_tokens_total: its capacity in tokens.
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
