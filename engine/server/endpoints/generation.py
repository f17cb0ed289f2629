"""Generation responses: one JSON document, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...base.image_input import NO_IMAGES, Images
from ...base.sampling_params import SamplingParams
from ...scheduling.outputs import Completion, RequestOutput, TokenLogprobs
from ..loop.loop import EngineLoop
from ..loop.stream import Job, OutputStream
from ..middleware.tenant import tenant_of
from ..observability.request_record import RequestRecord, record_of
from ..protocol.errors import ApiError
from ..protocol.protocol import GenerationRequest, StreamOptions
from ..protocol.scripted_output import ScriptedText
from ..protocol.structure import Constrainer
from ..text.images import PromptImages
from ..text.pooling_tasks import PoolingTasks
from ..text.text import Tokenization
from .usage import Usage

T = TypeVar("T")

MAX_LOGPROBS = 1 << 20
"""Log-probabilities in a response that is not streamed: it is held in memory."""
CLIENT_GONE = 499
"""Logged status of a request whose client disconnected before the response; nginx's number."""


class Generation(Protocol):
    """Converts the outputs of one HTTP request into an endpoint's response format."""

    async def document(self) -> dict[str, Any]:
        """The whole response, once every completion is finished."""
        ...

    def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Server-sent events, or lines. An error during generation is the last of them."""
        ...


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Identity of a response, and the output stream that it is built from."""

    id: str
    model: str
    created: int
    stream: OutputStream


@dataclass(frozen=True, slots=True)
class Service:
    """State shared by the endpoints. A LoRA adapter is served as a model under its own name: `adapters` are
    the folders by these names, changed on the event loop as adapters are loaded and unloaded."""

    loop: EngineLoop
    text: Tokenization
    constrainer: Constrainer
    model_name: str
    adapters: dict[str, Path]
    created: int
    max_model_len: int
    images: PromptImages
    script: tuple[ScriptedText, ...] = ()
    pooling: PoolingTasks = field(default_factory=PoolingTasks)

    def close(self) -> None:
        """Shut down the worker threads."""
        self.text.close()
        self.images.close()
        self.constrainer.close()

    def check(self, body: GenerationRequest) -> None:
        """Reject a request for an unknown model or with unsupported fields, with `ApiError`."""
        self.check_model(body.model)
        self.pooling.check_generates()
        body.refuse_unsupported()

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name, *self.adapters):
            served = ", ".join(repr(model) for model in (self.model_name, *sorted(self.adapters)))
            raise ApiError(
                404,
                f"no model {name!r}: this server has {served}",
                param="model",
                code="model_not_found",
            )

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter that a request for the model `name` uses; None for the base model.

        Raises:
            ApiError: it was unloaded since the request was checked.
        """
        self.check_model(name)
        return name if name in self.adapters else None

    async def params(self, request: Request, body: GenerationRequest) -> SamplingParams:
        """Sampling parameters, with the token mask of the request's structured output.

        Raises:
            BadInput, ApiError: values out of range, an invalid schema or grammar, or a client that left.
        """
        params, constraint = body.sampling_params(), body.constraint()
        if constraint is None:
            return params
        compiling = self.constrainer.mask(constraint, params.num_sequences)
        mask = await unless_disconnected(request, compiling)
        if mask is None:
            raise ApiError(CLIENT_GONE, "the client has left")
        return replace(params, token_mask=mask)

    async def respond(
        self,
        request: Request,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        id_prefix: str,
        generation: Callable[[ResponseContext], Generation],
        arrival_seconds: float,
        media_type: str = "text/event-stream",
        images: Images = NO_IMAGES,
    ) -> Response:
        """Generate for `prompts`; `body.stream` selects a stream or a single document. `images` are those of
        the only prompt.

        The response id is the prefix and the client's request id: that of the body, or the `X-Request-Id`
        that every request has.

        Raises:
            BadInput, TooMany, Unavailable: before the response begins.
        """
        record = record_of(request)
        response_id = f"{id_prefix}{body.request_id or record.request_id}"
        name = body.model or self.model_name
        tenant = tenant_of(request)
        jobs = [
            Job(
                # Clients may reuse their ids; the engine's request ids must be unique.
                f"{response_id}/{uuid.uuid4().hex}/{index}",
                token_ids,
                params,
                arrival_seconds,
                self.adapter(name),
                body.priority or 0,
                tenant.cache_salt(body.cache_salt),
                tenant.key,
                images=images,
            )
            for index, token_ids in enumerate(prompts)
        ]
        _reserve(record, prompts, params, self.max_model_len)
        stream = await self.loop.submit(jobs)
        record.begin(response_id, name, params, stream)
        generated = generation(ResponseContext(response_id, name, int(time.time()), stream))
        if body.stream:
            events = generated.events(body.stream_options or StreamOptions())
            return EventStream(events, stream.close, media_type)
        try:
            document = await unless_disconnected(request, generated.document())
        finally:
            stream.close()
        return Response(status_code=CLIENT_GONE) if document is None else JSONResponse(document)


def _reserve(
    record: RequestRecord,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_model_len: int,
) -> None:
    """Take prompts and `max_tokens` from the key's tokens per minute; without `max_tokens` the rest of the
    context.

    Raises:
        TooMany: they are not there.
    """
    num_prompt = sum(map(len, prompts))
    room = [params.max_tokens or max(0, max_model_len - len(prompt)) for prompt in prompts]
    num_tokens = num_prompt + sum(room) * params.num_sequences
    record.reserve(num_tokens, at_least=num_prompt if params.max_tokens is None else num_tokens)


class Shape(Protocol):
    """Formats the choices of an endpoint. One instance serves one HTTP request."""

    object_name: str
    chunk_name: str

    def prompt_scored(self, job: int, scores: Sequence[TokenLogprobs | None]) -> None:
        """Receive the log-probabilities of a prompt; they come before its first choice."""
        ...

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        """A finished choice of a response that is not streamed."""
        ...

    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        """The delta of a choice in one event; `first` is set on its first event."""
        ...


class Choices:
    """The outputs of one HTTP request as `choices`, for completions and chat completions."""

    def __init__(self, context: ResponseContext, shape: Shape) -> None:
        self._context = context
        self._shape = shape
        jobs = context.stream.jobs
        self._job_of = {job.request_id: index for index, job in enumerate(jobs)}
        self._usage = Usage(jobs)

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
            self._shape.whole(choice, job, completion)
            for choice, (job, completion) in sorted(completions.items())
        ]
        return self._envelope(self._shape.object_name, choices) | {"usage": self._usage.whole()}

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """One event per output, none before the first token; `[DONE]` only after success."""
        started: set[int] = set()
        wants_usage = options.include_usage or options.continuous_usage_stats
        try:
            async for output in self._context.stream:
                choice, job = self._take(output)
                delta = Completion.part(choice, output)
                part = self._shape.part(choice, job, delta, first=choice not in started)
                started.add(choice)
                event = self._envelope(self._shape.chunk_name, [part])
                if wants_usage:
                    event["usage"] = (
                        self._usage.so_far() if options.continuous_usage_stats else None
                    )
                yield server_sent(event)
            if options.include_usage:
                last = self._envelope(self._shape.chunk_name, []) | {"usage": self._usage.whole()}
                yield server_sent(last)
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield server_sent(error.body())

    def _take(self, output: RequestOutput) -> tuple[int, int]:
        """Record an output's usage; returns the indices of its choice and its job."""
        job = self._job_of[output.request_id]
        self._usage.take(output)
        if output.prompt_logprobs is not None:
            self._shape.prompt_scored(job, output.prompt_logprobs)
        return job * self._context.stream.jobs[job].params.n + output.index, job

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._context.id,
            "object": name,
            "created": self._context.created,
            "model": self._context.model,
            "choices": choices,
        }


class EventStream(StreamingResponse):
    """A stream of events. `on_close` always runs, even if the first event is never requested."""

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], None], media_type: str
    ) -> None:
        super().__init__(
            events,
            media_type=media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def server_sent(payload: dict[str, Any], name: str | None = None) -> bytes:
    """Encode a server-sent event, with an `event:` line if it has a name."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    event_line = b"" if name is None else f"event: {name}\n".encode()
    return event_line + b"data: " + text.encode() + b"\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Result of `work`; None, with `work` cancelled, if the client disconnects first."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
