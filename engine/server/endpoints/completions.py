"""`/v1/completions` and `/v1/chat/completions`: outputs as `choices`, whole and streamed, with logprobs."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from ...scheduling.outputs import Completion, RequestOutput, TokenLogprobs, num_logprobs
from ..parsing.formats import Arguments, CallStart, Event, Parsed, Reasoning, Text
from ..parsing.parser import OutputFormat, OutputParser
from ..protocol.chat_protocol import ChatRequest, NamedTool, chat_call
from ..protocol.errors import ApiError, bad_field
from ..protocol.generation_protocol import CompletionRequest, StreamOptions
from ..requests.request_record import record_of
from .conversation import converse
from .service import (
    Asked,
    Generation,
    ResponseContext,
    Service,
    Usage,
    compact_json,
    note_ignored,
    server_sent,
)
from .tokenization import Tokenization

MAX_LOGPROBS = 1 << 20
"""Log-probabilities in a response that is not streamed, and of its prompts: they are held in memory."""
MAX_LOGPROBS_PER_KEY = 4 * MAX_LOGPROBS
"""Maximum log-probabilities of prompts in flight per API key."""
MAX_ECHOED = 16 << 20
"""Characters of prompts that the choices of a response begin with."""
CHARACTERS_PER_SCORE = 64
"""Characters of a text that take as long to write as a log-probability, or longer."""
LOGPROBS_ON_LOOP = 4096
"""Log-probabilities that are written on the event loop, in a few milliseconds; more on a worker thread."""
LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_REASONING = ("reasoning_content", "reasoning")
"""DeepSeek's name, and the one that vLLM alone answers since 0.16: clients read one of them."""


T = TypeVar("T")


def json_pieces(value: Any, levels: int = 5) -> Iterator[bytes]:
    """Encode a document, of which `bytes` are JSON already, with no long call that holds Python's lock."""
    if isinstance(value, bytes):
        yield value
    elif levels and value and isinstance(value, dict):
        separator = b"{"
        for key, item in value.items():
            yield separator + compact_json(key) + b":"
            yield from json_pieces(item, levels - 1)
            separator = b","
        yield b"}"
    elif levels and value and isinstance(value, list):
        separator = b"["
        for item in value:
            yield separator
            yield from json_pieces(item, levels - 1)
            separator = b","
        yield b"]"
    else:
        yield compact_json(value)


class ChoicesResponse(Generation):
    """The outputs of one HTTP request as `choices`, which an endpoint's subclass formats."""

    object_name: str
    chunk_name: str

    def __init__(self, context: ResponseContext, service: Service) -> None:
        self._context, self._text, self._workers = context, service.text, service.workers
        jobs = context.stream.jobs
        self._key = jobs[0].key
        self._job_of = {job.request_id: index for index, job in enumerate(jobs)}
        self._usage = Usage(jobs)
        self._prompt_scores: dict[int, Sequence[TokenLogprobs | None]] = {}

    @abstractmethod
    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        """A finished choice of a response that is not streamed."""

    @abstractmethod
    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        """The delta of a choice in one event; `first` is set on its first event."""

    async def document(self) -> dict[str, Any] | bytes:
        completions: dict[int, tuple[int, Completion]] = {}
        num_scores = 0
        async for output in self._context.stream:
            choice, job = self._take(output)
            await self.write_scores(job)
            num_scores += num_logprobs(output.logprobs)
            if num_scores > MAX_LOGPROBS:
                raise ApiError(400, f"more than {MAX_LOGPROBS} log-probabilities: stream them")
            _, completion = completions.setdefault(choice, (job, Completion(choice)))
            completion.extend(output)

        def document() -> dict[str, Any]:
            choices = [self.whole(c, job, whole) for c, (job, whole) in sorted(completions.items())]
            return self._envelope(self.object_name, choices) | {"usage": self._usage.whole()}

        num_scores += sum(self.weight(job) for job, _ in completions.values())
        if num_scores <= LOGPROBS_ON_LOOP and not self.holds_json:
            return document()
        return await self._workers.run(self._key, lambda: b"".join(json_pieces(document())))

    holds_json = False
    """True if choices have parts that are JSON already."""

    async def write_scores(self, job: int) -> None:
        """Write the scores of a prompt, as soon as they have come; by default they wait for the choices."""
        return

    def weight(self, job: int) -> int:
        """Log-probabilities that the first part of a choice contains, or the like of them."""
        return num_logprobs(self._prompt_scores.get(job))

    async def run(self, num_scores: int, work: Callable[[], T]) -> T:
        """The result of `work`, which writes so many log-probabilities."""
        if num_scores <= LOGPROBS_ON_LOOP:
            return work()
        return await self._workers.run(self._key, work)

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """One event per output, none before the first token; `[DONE]` only after success."""
        started: set[int] = set()
        wants_usage = options.include_usage or options.continuous_usage_stats
        # Of every event but its choice the same bytes: they are written once.
        begin = server_sent(self._envelope(self.chunk_name, [])).removesuffix(b"]}\n\n")
        end = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"
        try:
            async for output in self._context.stream:
                choice, job = self._take(output)
                delta = Completion.part(choice, output)
                if options.continuous_usage_stats:
                    end = b'],"usage":%b}\n\n' % compact_json(self._usage.so_far())
                if choice in started:
                    yield begin + compact_json(self.part(choice, job, delta, first=False)) + end
                    continue
                started.add(choice)
                write = partial(self.part, choice, job, delta, first=True)
                part = await self.run(self.weight(job), lambda write=write: compact_json(write()))
                yield begin + part + end
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
            # Taken out of the output, which is kept as the last one of its sequence.
            self._prompt_scores[job], output.prompt_logprobs = output.prompt_logprobs, None
        return job * self._context.stream.jobs[job].params.n + output.index, job

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        context = self._context
        head = {"id": context.id, "object": name, "created": context.created}
        return {**head, "model": context.model, "choices": choices}


def chat_logprobs(text: Tokenization, scored: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = text.token(token_id)
        raw = None if token.raw is None else list(token.raw)
        return {"token": token.name, "logprob": max(logprob, LOWEST), "bytes": raw}

    content = []
    for token in scored:
        top = [entry(*candidate) for candidate in token.top]
        content.append({**entry(token.token_id, token.logprob), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(
    text: Tokenization, scored: Sequence[TokenLogprobs | None], num_top: int
) -> bytes:
    """`choices[].prompt_logprobs` in vLLM's form, as JSON: for each position the top tokens and the prompt's
    own, by token id; null at the first position, which nothing predicts."""

    def by_id(scored: TokenLogprobs) -> dict[str, Any]:
        top = [(token, logprob, rank) for rank, (token, logprob) in enumerate(scored.top, start=1)]
        given = (scored.token_id, scored.logprob, scored.rank)
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST),
                "rank": rank,
                "decoded_token": text.token(token_id).name,
            }
            for token_id, logprob, rank in (*top[:num_top], given)
        }

    positions = (None if token is None else by_id(token) for token in scored)
    return b"[%s]" % b",".join(map(compact_json, positions))


class CompletionResponse(ChoicesResponse):
    """Choices of a completion: text, preceded by the prompt if `echo` is set."""

    object_name = chunk_name = "text_completion"

    def __init__(
        self,
        context: ResponseContext,
        service: Service,
        body: CompletionRequest,
        echoed: Sequence[str] | None,
    ) -> None:
        """`echoed`: texts of the prompts, if the choices begin with them."""
        super().__init__(context, service)
        self._body, self._echoed = body, echoed
        self._written: dict[int, bytes] = {}
        self.holds_json = body.prompt_logprobs is not None
        self._name: Callable[[int], str] = lambda token_id: self._text.token(token_id).name
        if body.return_tokens_as_token_ids:
            self._name = lambda token_id: f"token_id:{token_id}"
        self._offsets: dict[int, int] = {}

    def weight(self, job: int) -> int:
        echoed = "" if self._echoed is None else self._echoed[job]
        return super().weight(job) + len(echoed) // CHARACTERS_PER_SCORE

    async def write_scores(self, job: int) -> None:
        num_top = self._body.prompt_logprobs
        if num_top is None or job in self._written or job not in self._prompt_scores:
            return
        scores = self._prompt_scores[job]
        if self._body.logprobs is None or not self._body.echo:  # nothing else reads them
            del self._prompt_scores[job]
        write = partial(prompt_logprobs, self._text, scores, num_top)
        self._written[job] = await self.run(num_logprobs(scores), write)

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        fields = self.part(choice, job, completion, first=True)
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._written[job]
        return fields

    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        text = output.text
        token_ids: list[int] = output.token_ids
        scores: list[TokenLogprobs | None] | None = None
        if output.logprobs is not None:
            scores = [*output.logprobs]
        if self._body.only_echoes:
            text, token_ids, scores = "", [], None if scores is None else []
        if first and self._echoed is not None:
            text = self._echoed[job] + text
            if scores is not None:
                prompt = self._context.stream.jobs[job].token_ids
                # Counted back from the end of the prompt: its first word may have been tokenized with a
                # space that its text does not have.
                length = sum(self._text.token(token_id).length for token_id in prompt)
                self._offsets[choice] = len(self._echoed[job]) - length
                token_ids = [*prompt, *token_ids]
                scores = [*self._prompt_scores[job], *scores]
        logprobs = None
        if scores is not None:
            logprobs = self._logprobs(choice, token_ids, scores)
        ending = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return {"index": choice, "text": text, "logprobs": logprobs, **ending}

    def _logprobs(
        self, choice: int, token_ids: Sequence[int], scored: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """`choices[].logprobs`, whose text offsets go on from the choice's part before. The first token of a
        prompt has no log-probability: its entries are null. The sampled token is always among the candidates,
        so there may be one more of them than the body requests."""
        num_top, begin = self._body.logprobs or 0, self._offsets.get(choice, 0)
        lengths = (self._text.token(token_id).length for token_id in token_ids)
        *offsets, self._offsets[choice] = accumulate(lengths, initial=begin)

        def candidates(token: TokenLogprobs) -> dict[str, float]:
            named: dict[str, float] = {}
            for token_id, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
                # Different tokens may decode to the same text; the most likely one keeps the name.
                named.setdefault(self._name(token_id), max(logprob, LOWEST))
            return named

        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if s is None else max(s.logprob, LOWEST) for s in scored],
            "top_logprobs": [None if s is None else candidates(s) for s in scored],
            "text_offset": [max(offset, 0) for offset in offsets],
        }


class ChatResponse(ChoicesResponse):
    """Choices of a chat completion: whole messages, or the deltas of a stream."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, context: ResponseContext, service: Service, form: OutputFormat, body: ChatRequest
    ) -> None:
        super().__init__(context, service)
        self._form = form
        self._parsers: dict[int, OutputParser] = {}
        self._tool_is_named = isinstance(body.tool_choice, NamedTool)
        # The first call comes as a `function_call` too, which `functions` asks for.
        self._as_function = body.has_functions

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        parsed = Parsed()
        parsed.add(self._read(choice, completion))
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.reasoning:
            message |= dict.fromkeys(_REASONING, parsed.reasoning)
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [
                chat_call(call.id, call.name, call.arguments) for call in parsed.calls
            ]
            if self._as_function:
                message["function_call"] = message["tool_calls"][0]["function"]
        return self._choice(choice, completion, {"message": message})

    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        delta = _delta(self._read(choice, output))
        if self._as_function and (calls := delta.get("tool_calls")) and calls[0]["index"] == 0:
            delta["function_call"] = calls[0]["function"]
        if first:  # a separate event with the role would count as a token in clients' TTFT
            delta = {"role": "assistant"} | delta
        return self._choice(choice, output, {"delta": delta})

    def _read(self, choice: int, output: Completion) -> list[Event]:
        if choice not in self._parsers:
            self._parsers[choice] = OutputParser(self._form, choice)
        return self._parsers[choice].feed(output.text, is_last=output.finish_reason is not None)

    def _choice(self, choice: int, output: Completion, content: dict[str, Any]) -> dict[str, Any]:
        scored, reason = output.logprobs, output.finish_reason
        if reason == "stop" and self._parsers[choice].num_calls and not self._tool_is_named:
            reason = "function_call" if self._as_function else "tool_calls"
        return {
            "index": choice,
            **content,
            "logprobs": None if scored is None else chat_logprobs(self._text, scored),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }


def _delta(events: Sequence[Event]) -> dict[str, Any]:
    """A delta with everything that came with a token; never empty, because clients count deltas."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Text(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta |= dict.fromkeys(_REASONING, delta.get("reasoning", "") + text)
            case CallStart(index, call_id, name):
                calls[index] = {"index": index, **chat_call(call_id, name, "")}
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = [*calls.values()]
    return delta or {"content": ""}


def add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        arrival_seconds = time.perf_counter()
        service.check(body, request)
        params = await service.params(request, body, body.constraint())
        prompts, suffix = body.prompts, body.suffix
        if suffix:
            prompts = [service.text.filled_in(prompt, suffix) for prompt in prompts]
        token_ids = await service.text.encode(prompts)
        # A prompt that is echoed is written once for each choice.
        num_copies = params.n if body.echo else 1
        if (wanted := params.prompt_logprobs) is not None:
            kind = "log-probabilities of prompts"
            num_scores = num_copies * (1 + wanted) * sum(map(len, token_ids))
            if num_scores > MAX_LOGPROBS:
                remedy = "send fewer prompts at once, or ask for fewer of each token"
                problem = f"{num_scores:,} {kind}, at most {MAX_LOGPROBS:,}: {remedy}"
                raise ApiError(400, problem, param="prompt")
            record_of(request).hold(kind, num_scores, MAX_LOGPROBS_PER_KEY)
        echoed: list[str] | None = None
        if body.echo:
            texts = (p if isinstance(p, str) else service.text.decode(p) for p in body.prompts)
            echoed = await service.off_loop(request, lambda: [*texts])
            if (size := num_copies * sum(map(len, echoed))) > MAX_ECHOED:
                problem = f"{size:,} characters in all choices, at most {MAX_ECHOED:,}"
                raise bad_field("echo", problem)
        return await service.respond(
            Asked(request, body, params, token_ids, "cmpl-", arrival_seconds),
            lambda context: CompletionResponse(context, service, body, echoed),
        )

    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        note_ignored(request, body.model_extra or ())
        return await converse(
            *(service, request, body, "chatcmpl-"),
            lambda context, form: ChatResponse(context, service, form, body),
        )
