"""From jobs to a response: one JSON document, or a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..outputs import Completion, RequestOutput, TokenLogprobs
from ..sampling_params import SamplingParams
from .errors import ApiError
from .loop import EngineLoop, Job, OutputStream
from .protocol import GenerationRequest, StreamOptions
from .text import Tokenization

T = TypeVar("T")

CLIENT_GONE = 499
"""Status in the log of a request whose client left before the answer; nginx's number."""


class Shape(Protocol):
    """How an endpoint writes its choices. One instance serves one request."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def prompt_scored(self, job: int, scores: Sequence[TokenLogprobs | None]) -> None:
        """Take the log-probabilities of a prompt; they come before its first choice."""
        ...

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        """A finished choice of a response that is no stream."""
        ...

    def part(self, choice: int, job: int, piece: Completion, *, first: bool) -> dict[str, Any]:
        """What an event adds to a choice; `first` is set on its first event."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints share. An adapter is served as a model of its own name."""

    loop: EngineLoop
    text: Tokenization
    model_name: str
    adapters: frozenset[str]
    created: int

    def check(self, body: GenerationRequest) -> None:
        """Refuse a request for another model, or for what is not supported, with `ApiError`."""
        self.check_model(body.model)
        body.refuse_unsupported()

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name, *self.adapters):
            served = ", ".join(repr(one) for one in (self.model_name, *sorted(self.adapters)))
            raise ApiError(
                404,
                f"no model {name!r}: this server has {served}",
                param="model",
                code="model_not_found",
            )

    async def respond(
        self,
        request: Request,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        shape: Shape,
        arrival_seconds: float,
    ) -> Response:
        """Generate for `prompts`; the response follows `body.stream`.

        Raises:
            BadInput, Unavailable: before the response begins.
        """
        response_id = f"{shape.id_prefix}-{uuid.uuid4().hex}"
        name = body.model or self.model_name
        lora = name if name in self.adapters else None
        jobs = [
            Job(
                f"{response_id}/{index}",
                token_ids,
                params,
                arrival_seconds,
                lora,
                body.priority or 0,
            )
            for index, token_ids in enumerate(prompts)
        ]
        stream = await self.loop.submit(jobs)
        generation = Generation(response_id, name, shape, stream)
        if body.stream:
            events = generation.events(body.stream_options or StreamOptions())
            return EventStream(events, on_close=stream.close)
        try:
            document = await _unless_disconnected(request, generation.document())
        finally:
            stream.close()
        return Response(status_code=CLIENT_GONE) if document is None else JSONResponse(document)


class Generation:
    """The output of one request as its endpoint writes it."""

    def __init__(
        self, response_id: str, model_name: str, shape: Shape, stream: OutputStream
    ) -> None:
        self._id = response_id
        self._model_name = model_name
        self._shape = shape
        self._stream = stream
        self._created = int(time.time())
        self._job_of = {job.request_id: index for index, job in enumerate(stream.jobs)}
        self._cached_tokens = [0] * len(stream.jobs)
        self._num_output_tokens = 0

    async def document(self) -> dict[str, Any]:
        """The whole response, once everything is finished."""
        completions: dict[int, tuple[int, Completion]] = {}
        async for piece in self._stream:
            choice, job = self._take(piece)
            _, completion = completions.setdefault(choice, (job, Completion(choice)))
            completion.extend(piece)
        choices = [
            self._shape.whole(choice, job, completion)
            for choice, (job, completion) in sorted(completions.items())
        ]
        return self._envelope(self._shape.object_name, choices) | {"usage": self._usage()}

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Server-sent events, one for every token; none before the first token.

        A failure on the way is the last event; `[DONE]` follows success alone.
        """
        started: set[int] = set()
        wants_usage = options.include_usage or options.continuous_usage_stats
        try:
            async for piece in self._stream:
                choice, job = self._take(piece)
                completion = Completion(choice)
                completion.extend(piece)
                part = self._shape.part(choice, job, completion, first=choice not in started)
                started.add(choice)
                event = self._envelope(self._shape.chunk_name, [part])
                if wants_usage:
                    event["usage"] = self._usage() if options.continuous_usage_stats else None
                yield _event(event)
            if options.include_usage:
                last = self._envelope(self._shape.chunk_name, []) | {"usage": self._usage()}
                yield _event(last)
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())

    def _take(self, piece: RequestOutput) -> tuple[int, int]:
        """Count a piece; returns the choice and the job that it belongs to."""
        job = self._job_of[piece.request_id]
        self._num_output_tokens += len(piece.new_token_ids)
        self._cached_tokens[job] = piece.num_cached_tokens
        if piece.prompt_logprobs is not None:
            self._shape.prompt_scored(job, piece.prompt_logprobs)
        return job * self._stream.jobs[job].params.n + piece.index, job

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model_name,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens = sum(len(job.token_ids) for job in self._stream.jobs)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }


class EventStream(StreamingResponse):
    """Server-sent events. `on_close` runs whatever happens, even if the first event is never asked for."""

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def _event(payload: dict[str, Any]) -> bytes:
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Result of `work`; None, with `work` cancelled, if the client leaves first."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
