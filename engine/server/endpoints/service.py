"""State and mechanics that the endpoints share: admission, jobs, whole and streamed responses, usage."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...base.image_input import NO_IMAGES, Images
from ...base.sampling_params import PoolingParams, SamplingParams
from ...scheduling.outputs import RequestOutput
from ..protocol.errors import ApiError
from ..protocol.generation_protocol import GenerationRequest, PoolingRequest, StreamOptions
from ..protocol.server_options import ScriptedText
from ..protocol.structure import Constraint
from ..requests.loop import EngineLoop
from ..requests.middleware import MAX_ON_LOOP
from ..requests.request_record import (
    WRITE_KEY,
    Job,
    OutputStream,
    WriteChunk,
    cache_salt,
    phases_of,
    record_of,
)
from .capabilities import Constrainer, FairPool, PoolingTasks, PromptImages
from .tokenization import Tokenization


class Usage:
    """Accumulates the usage of one HTTP request, which may have several prompts and choices."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.num_prompt_tokens = sum(len(job.token_ids) for job in jobs)
        self.num_output_tokens = 0
        self._last: dict[tuple[str, int], RequestOutput] = {}

    def take(self, output: RequestOutput) -> None:
        self.num_output_tokens += len(output.new_token_ids)
        self._last[output.request_id, output.index] = output

    @property
    def num_cached_tokens(self) -> int:
        by_job = {output.request_id: output.num_cached_tokens for output in self._last.values()}
        return sum(by_job.values())

    def so_far(self) -> dict[str, Any]:
        """Token counts so far, as in OpenAI's completions and chat completions."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def whole(self) -> dict[str, Any]:
        """Final token counts, and `seconds`: from arrival to the first scheduled step (`queue`), to the first
        token of any choice (`prefill`), and to the last token of all choices (`decode`)."""
        arrival, begun, first, last = phases_of(self._last.values())
        seconds = {"queue": begun - arrival, "prefill": first - begun, "decode": last - first}
        return {**self.so_far(), "seconds": {name: round(s, 6) for name, s in seconds.items()}}


T = TypeVar("T")

CLIENT_GONE = 499
"""Logged status of a request whose client disconnected before the response; nginx's number."""
FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_IGNORED, MOST_LOOKED_AT = 32, 1024


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Name fields without an effect in a header of the response, those whose names a header can carry."""
    shown = [name for name in islice(names, MOST_LOOKED_AT) if FIELD_NAME.fullmatch(name)]
    record_of(request).ignored = tuple(sorted(shown)[:MAX_IGNORED])


class Generation(ABC):
    """Converts the outputs of one HTTP request into an endpoint's response format."""

    @abstractmethod
    async def document(self) -> dict[str, Any] | bytes:
        """The whole response, once every completion is finished; a large one as JSON already."""

    @abstractmethod
    def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Server-sent events, or lines. An error during generation is the last of them."""


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Identity of a response, and the output stream that it is built from."""

    id: str
    model: str
    created: int
    stream: OutputStream


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for the engine, and the parameters and prompts that were made of its body.

    Attributes:
        id_prefix: begin of the response's id; the rest is the body's `request_id`, or the `X-Request-Id` that
            every request has.
        images: images of the only prompt.
        pooling: parameters of prompts that are pooled; nothing is generated then.
    """

    request: Request
    body: GenerationRequest | PoolingRequest
    params: SamplingParams
    prompts: list[list[int]]
    id_prefix: str
    arrival_seconds: float
    images: Images = NO_IMAGES
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """State shared by the endpoints. A LoRA adapter is served as a model under its own name: `adapters` are
    the folders by these names, changed on the event loop as adapters are loaded and unloaded. `workers` read
    and write large JSON; `default_sampling` is for fields that a request does not have."""

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
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    workers: FairPool = field(default_factory=lambda: FairPool("json", 2, 1))

    def close(self) -> None:
        self.text.close()
        self.images.close()
        self.constrainer.close()
        self.workers.close()

    async def off_loop(self, request: Request, work: Callable[[], T]) -> T:
        """The result of `work` on the request's body, on a worker thread if the body is a large one."""
        record = record_of(request)
        if record.held["bytes of bodies"] <= MAX_ON_LOOP:
            return work()
        return await self.workers.run(record.tenant, work)

    def check(
        self, body: GenerationRequest | PoolingRequest, request: Request | None = None
    ) -> None:
        """Reject a request for an unknown model or with unsupported fields, with `ApiError`; fields that are
        not known are named in the response to `request`."""
        if request is not None:
            note_ignored(request, body.model_extra or ())
        self.check_model(body.model)
        if isinstance(body, GenerationRequest):
            self.pooling.check_generates()
        body.refuse_unsupported()

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name, *self.adapters):
            served = ", ".join(map(repr, (self.model_name, *sorted(self.adapters))))
            problem = f"no model {name!r}: this server has {served}"
            raise ApiError(404, problem, param="model", code="model_not_found")

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter that a request for the model `name` uses; None for the base model. Raises
        `ApiError`: it was unloaded since the request was checked."""
        self.check_model(name)
        return name if name in self.adapters else None

    async def params(
        self, request: Request, body: GenerationRequest, constraint: Constraint | None
    ) -> SamplingParams:
        """Sampling parameters, with the token mask of a structured output. Raises `BadInput` or `ApiError`:
        values out of range, an invalid schema or grammar, or a client that left."""
        params = body.sampling_params()
        defaults = self.default_sampling.items()
        params = replace(params, **{n: value for n, value in defaults if getattr(body, n) is None})
        if constraint is None:
            return params
        tenant = record_of(request).tenant
        compiling = self.constrainer.mask(constraint, params.num_sequences, tenant)
        mask = await unless_disconnected(request, compiling)
        if mask is None:
            raise ApiError(CLIENT_GONE, "the client has left")
        return replace(params, token_mask=mask)

    async def submit(self, prepared: Asked) -> ResponseContext:
        """Queue a job for each prompt. The caller closes the stream. Raises `BadInput` or `TooMany` or
        `Unavailable`: the engine refuses a prompt, or its queue is full."""
        record = record_of(prepared.request)
        body, params, prompts = prepared.body, prepared.params, prepared.prompts
        response_id = f"{prepared.id_prefix}{body.request_id or record.request_id}"
        name = body.model or self.model_name
        jobs = [
            Job(
                # Clients may reuse their ids; the engine's request ids must be unique.
                f"{response_id}/{uuid.uuid4().hex}/{index}",
                token_ids,
                params,
                prepared.arrival_seconds,
                self.adapter(name),
                body.priority or 0,
                cache_salt(record.tenant, body.cache_salt),
                record.tenant,
                prepared.pooling,
                prepared.images,
            )
            for index, token_ids in enumerate(prompts)
        ]
        record.hold("sequences", len(jobs) * params.num_sequences, self.loop.max_sequences_of_key)
        stream = await self.loop.submit(jobs)
        record.response_id, record.model, record.stream = response_id, name, stream
        return ResponseContext(response_id, name, int(time.time()), stream)

    async def respond(
        self,
        prepared: Asked,
        generation: Callable[[ResponseContext], Generation],
        media_type: str = "text/event-stream",
    ) -> Response:
        """Generate for the prompts; `stream` of the body selects a stream or a single document. Raises
        `BadInput` or `TooMany` or `Unavailable`: before the response begins, as `submit`."""
        body, context = prepared.body, await self.submit(prepared)
        assert isinstance(body, GenerationRequest)
        generated = generation(context)
        if body.stream:
            events = generated.events(body.stream_options or StreamOptions())
            return EventStream(events, context.stream.close, media_type)
        try:
            document = await unless_disconnected(prepared.request, generated.document())
        finally:
            context.stream.close()
        if document is None:
            return Response(status_code=CLIENT_GONE)
        if isinstance(document, bytes):
            return Response(document, media_type="application/json")
        return JSONResponse(document)


class EventStream(StreamingResponse):
    """A stream of events, each a chunk of its own. `on_close` always runs, even if the first event is never
    requested."""

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], None], media_type: str
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The server's `send` does nothing once the client has left: all outputs would still be written.
        try:
            await unless_disconnected(Request(scope, receive), self._send(scope, send))
        finally:
            self._on_close()

    async def _send(self, scope: Scope, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})

        async def send_chunk(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        write: WriteChunk = scope.get(WRITE_KEY) or send_chunk
        async for data in self.body_iterator:
            assert isinstance(data, bytes)
            await write(data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def server_sent(payload: dict[str, Any], name: str | None = None) -> bytes:
    """Encode a server-sent event, with an `event:` line if it has a name."""
    event_line = b"" if name is None else f"event: {name}\n".encode()
    return event_line + b"data: " + compact_json(payload) + b"\n\n"


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def compact_json(payload: Any) -> bytes:
    return _compact(payload).encode()


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
