"""Outputs as OpenAI's `choices`, whole and streamed, with their log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from ...scheduling.outputs import Completion, RequestOutput, TokenLogprobs
from ..protocol.errors import ApiError
from ..protocol.generation_protocol import StreamOptions
from .service import ResponseContext, Usage, server_sent
from .tokenization import Tokenization

MAX_LOGPROBS = 1 << 20
"""Log-probabilities in a response that is not streamed: it is held in memory."""
LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


class ChoicesResponse(ABC):
    """The outputs of one HTTP request as `choices`, which an endpoint's subclass formats."""

    object_name: str
    chunk_name: str

    def __init__(self, context: ResponseContext, text: Tokenization) -> None:
        self._context, self._text = context, text
        jobs = context.stream.jobs
        self._job_of = {job.request_id: index for index, job in enumerate(jobs)}
        self._usage = Usage(jobs)
        self._prompt_scores: dict[int, Sequence[TokenLogprobs | None]] = {}

    @abstractmethod
    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        """A finished choice of a response that is not streamed."""

    @abstractmethod
    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        """The delta of a choice in one event; `first` is set on its first event."""

    async def document(self) -> dict[str, Any]:
        completions: dict[int, tuple[int, Completion]] = {}
        num_logprobs = 0
        async for output in self._context.stream:
            choice, job = self._take(output)
            num_logprobs += sum(1 + len(token.top) for token in output.logprobs or ())
            if num_logprobs > MAX_LOGPROBS:
                raise ApiError(400, f"more than {MAX_LOGPROBS} log-probabilities: stream them")
            _, completion = completions.setdefault(choice, (job, Completion(choice)))
            completion.extend(output)
        choices = [
            self.whole(choice, job, completion)
            for choice, (job, completion) in sorted(completions.items())
        ]
        return self._envelope(self.object_name, choices) | {"usage": self._usage.whole()}

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """One event per output, none before the first token; `[DONE]` only after success."""
        started: set[int] = set()
        wants_usage = options.include_usage or options.continuous_usage_stats
        try:
            async for output in self._context.stream:
                choice, job = self._take(output)
                delta = Completion.part(choice, output)
                part = self.part(choice, job, delta, first=choice not in started)
                started.add(choice)
                event = self._envelope(self.chunk_name, [part])
                if wants_usage:
                    event["usage"] = (
                        self._usage.so_far() if options.continuous_usage_stats else None
                    )
                yield server_sent(event)
            if options.include_usage:
                last = self._envelope(self.chunk_name, []) | {"usage": self._usage.whole()}
                yield server_sent(last)
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield server_sent(error.body())

    def _take(self, output: RequestOutput) -> tuple[int, int]:
        """Record an output's usage; returns the indices of its choice and its job."""
        job = self._job_of[output.request_id]
        self._usage.take(output)
        if output.prompt_logprobs is not None:
            self._prompt_scores[job] = output.prompt_logprobs
        return job * self._context.stream.jobs[job].params.n + output.index, job

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._context.id,
            "object": name,
            "created": self._context.created,
            "model": self._context.model,
            "choices": choices,
        }


def chat_logprobs(text: Tokenization, scored: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    return {
        "content": [
            {
                **_chat_entry(text, token.token_id, token.logprob),
                "top_logprobs": [_chat_entry(text, *candidate) for candidate in token.top],
            }
            for token in scored
        ]
    }


def _chat_entry(text: Tokenization, token_id: int, logprob: float) -> dict[str, Any]:
    token = text.token(token_id)
    return {
        "token": token.name,
        "logprob": max(logprob, LOWEST),
        "bytes": None if token.raw is None else list(token.raw),
    }


def completion_logprobs(
    text: Tokenization,
    token_ids: Sequence[int],
    scored: Sequence[TokenLogprobs | None],
    offset: int,
    name: Callable[[int], str],
    num_top: int,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is the text offset of the first token.

    The first token of a prompt has no log-probability: its entries are null. The sampled token is always
    among the candidates, so there may be one more of them than the `num_top` requested.
    """
    offsets: list[int] = []
    for token_id in token_ids:
        offsets.append(max(offset, 0))
        offset += text.token(token_id).length
    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [None if s is None else max(s.logprob, LOWEST) for s in scored],
        "top_logprobs": [None if s is None else _candidates(s, name, num_top) for s in scored],
        "text_offset": offsets,
    }


def token_id_name(token_id: int) -> str:
    """The name of a token under vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def prompt_logprobs(
    text: Tokenization, scored: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """`choices[].prompt_logprobs` in vLLM's form: for each position the top tokens and the prompt's own, by
    token id; null at the first position, which nothing predicts."""
    return [None if token is None else _by_id(text, token, num_top) for token in scored]


def _by_id(text: Tokenization, scored: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(scored.top, start=1)]
    given = (scored.token_id, scored.logprob, scored.rank)
    return {
        str(token_id): {
            "logprob": max(logprob, LOWEST),
            "rank": rank,
            "decoded_token": text.token(token_id).name,
        }
        for token_id, logprob, rank in (*ranked[:num_top], given)
    }


def _candidates(
    scored: TokenLogprobs, name: Callable[[int], str], num_top: int
) -> dict[str, float]:
    named: dict[str, float] = {}
    for token_id, logprob in (*scored.top[:num_top], (scored.token_id, scored.logprob)):
        # Different tokens may decode to the same text; the most likely one keeps the name.
        named.setdefault(name(token_id), max(logprob, LOWEST))
    return named
