"""Engine requests, the asynchronous streams of their outputs, API keys, and the record of a request for log
lines, with its tenant, the API key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from ...base.image_input import NO_IMAGES, Images
from ...base.sampling_params import PoolingParams, SamplingParams
from ...scheduling.outputs import RequestOutput, num_logprobs
from ..protocol.errors import ApiError, TooMany
from ..protocol.server_options import ServerOptions

SLICE = 16
"""Outputs that one stream takes before others get their turn on the event loop."""

UNREAD, UNREAD_PER_SEQUENCE = 1024, 8
"""Tokens and log-probabilities that wait for a reader before its sequences are held."""


def phases_of(outputs: Iterable[RequestOutput]) -> tuple[float, float, float, float]:
    """Times of a request of `time.perf_counter`, from the last output of each sequence: arrival, first step,
    the first token of all sequences and the last. What has not happened has the time before it."""
    times = [output.times for output in outputs]
    arrival = min(t.arrival for t in times)
    begun = min(t.first_scheduled or arrival for t in times)
    first = min(t.first_token or begun for t in times)
    return arrival, begun, first, max(t.last_token or first for t in times)


@dataclass(frozen=True, slots=True)
class Job:
    """One engine request: a prompt. `arrival_seconds` is a time of `time.perf_counter`, `key` the index of
    the API key that it came with. With `pooling` it generates nothing."""

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    arrival_seconds: float
    lora: str | None = None
    priority: int = 0
    cache_salt: bytes = b""
    key: int = 0
    pooling: PoolingParams | None = None
    images: Images = NO_IMAGES


class OutputStream:
    """Asynchronous stream of the `RequestOutput`s of some jobs: `async for output in stream`.

    Ends when every completion of every job has a finish reason. Raises `Unavailable` if the engine
    fails or stops first, and 504 after `timeout_seconds`. `close` must be called at the end; it
    aborts unfinished requests. Where nobody reads, the sequences are held until the half of what
    waits has been read.

    Attributes:
        last_outputs: the latest output of each sequence, by request id and index.
        is_held: True if its sequences wait for the reader.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        timeout_seconds: float,
        on_close: Callable[[OutputStream], None],
        on_hold: Callable[[OutputStream], None] = lambda _: None,
    ) -> None:
        self.jobs = jobs
        self.is_held = False
        self._on_hold = on_hold
        self._num_unread = 0
        self.last_outputs: dict[tuple[str, int], RequestOutput] = {}
        self._on_close = on_close
        self._outputs: asyncio.Queue[RequestOutput | ApiError] = asyncio.Queue()
        self._num_unfinished = sum(job.params.n for job in jobs)
        self._most_unread = UNREAD + UNREAD_PER_SEQUENCE * sum(j.params.num_sequences for j in jobs)
        problem = f"the response was not complete after {timeout_seconds:g} s"
        self._deadline = asyncio.get_running_loop().call_later(
            timeout_seconds, self.push, ApiError(504, problem, code="timeout")
        )

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        for number in count(1):
            if self._num_unfinished == 0:
                return
            if number % SLICE == 0:  # a queue that is full never waits
                await asyncio.sleep(0)
            output = await self._outputs.get()
            if isinstance(output, ApiError):
                raise output
            # Sequences of a grammar that failed end without what it asks for.
            problem = getattr(self.jobs[0].params.token_mask, "failure", None)
            if output.finish_reason is not None and problem:
                raise ApiError(400, problem, code="grammar_failed")
            self._num_unfinished -= output.finish_reason is not None
            self._num_unread -= _weight(output)
            if self.is_held and 2 * self._num_unread <= self._most_unread:
                self._hold(False)
            yield output

    def push(self, output: RequestOutput | ApiError) -> None:
        # Tokens are counted though a client takes none of them.
        if not isinstance(output, ApiError):
            self.last_outputs[output.request_id, output.index] = output
            self._num_unread += _weight(output)
            if not self.is_held and self._num_unread > self._most_unread:
                self._hold(True)
        self._outputs.put_nowait(output)

    def _hold(self, is_held: bool) -> None:
        self.is_held = is_held
        self._on_hold(self)

    def close(self) -> None:
        self._deadline.cancel()
        self._on_close(self)


def _weight(output: RequestOutput) -> int:
    tokens = len(output.new_token_ids)
    if output.logprobs is None and output.prompt_logprobs is None:  # as of most, twice a token
        return tokens
    return tokens + num_logprobs(output.logprobs) + num_logprobs(output.prompt_logprobs)


def cache_salt(tenant: int, salt: str | None) -> bytes:
    """Salt of the prefix cache's hashes. A hit shows in `cached_tokens` and in the TTFT, by which tenants who
    shared the cache could find out each other's prompts. `salt`, of the request, separates users of a key."""
    return b"" if tenant == 0 and salt is None else f"{tenant}/{salt or ''}".encode()


WriteChunk = Callable[[bytes], Awaitable[None]]
WRITE_KEY = "llmopt.write"
"""Key in an ASGI scope of a function that writes a chunk of the body of a response that has begun; None or
missing where the chunk must go through `send`."""

FULL_KEY = "llmopt.full"
"""Key in an ASGI scope: True if the server has no connection left but the reserved ones."""

RECORD_KEY = "llmopt.request"
CURRENT: ContextVar[RequestRecord | None] = ContextVar("llmopt_request", default=None)
"""The request that a log line belongs to: every coroutine of a request runs in a copy of its context."""


@dataclass(slots=True, eq=False)
class Principal:
    """One client.

    Attributes:
        number: index of the API key, which separates prefix caches and worker threads.
        key_name: name of the API key, never the key; None without keys.
        is_admin: True if the client may see metrics and the engine's state, and load adapters.
        held: memory that its open requests take, by kind.
    """

    number: int
    key_name: str | None
    is_admin: bool
    held: Counter[str] = field(default_factory=Counter)


class KeyRing:
    """The API keys of the options. Without any, all clients are one, an admin."""

    def __init__(self, options: ServerOptions) -> None:
        admin, keys = options.admin_api_key, options.api_keys
        named = {key: f"api-key-{number}" for number, key in enumerate(keys, 1)}
        if admin is not None:
            named.setdefault(admin, "admin")
        self._anyone = None if named else Principal(0, None, True)
        self._digests = [
            (hashlib.sha256(key.encode()).digest(), Principal(number, name, admin in (None, key)))
            for number, (key, name) in enumerate(named.items())
        ]

    def find(self, secret: bytes) -> Principal | None:
        """The client with this key. Digests are compared in constant time, each with every key's."""
        given, match = hashlib.sha256(secret).digest(), self._anyone
        for expected, principal in self._digests:
            if hmac.compare_digest(given, expected):
                match = principal
        return match


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Written by the event loop alone.

    Attributes:
        request_id: the client's `X-Request-Id`, or a random one.
        path: path without the query, percent-encoded.
        principal: client with the API key; None before that is known.
        response_id: `id` of the response, with which the engine's request ids begin.
        stream: outputs of the engine; None for requests that generate nothing.
        held: amounts in memory until the request's end, by kind.
        ignored: fields of the body that had no effect, for a header of the response.
    """

    request_id: str
    method: str
    path: str
    client: str
    began: float = field(default_factory=time.perf_counter)
    principal: Principal | None = None
    status: int | None = None
    response_id: str | None = None
    model: str | None = None
    stream: OutputStream | None = None
    held: Counter[str] = field(default_factory=Counter)
    ignored: tuple[str, ...] = ()

    @property
    def key(self) -> str | None:
        """The name of the API key; None without keys."""
        return None if self.principal is None else self.principal.key_name

    @property
    def tenant(self) -> int:
        return 0 if self.principal is None else self.principal.number

    def hold(self, kind: str, amount: int, limit: int) -> None:
        """Count what the request takes in memory until its end. Raises `TooMany`: the requests of its key
        take more than `limit` of that kind."""
        if self.principal is None:
            return
        self.held[kind] += amount
        self.principal.held[kind] += amount
        if (total := self.principal.held[kind]) > limit:
            problem = f"{total:,} {kind} of this key's requests in memory, at most {limit:,} may be"
            raise TooMany(f"{problem}: try again later", {"Retry-After": "1"})

    def let_go(self) -> None:
        if self.principal is not None:
            self.principal.held.subtract(self.held)

    def totals(self) -> dict[str, Any]:
        """Fields of the access line, from the last output of each sequence: tokens so far, and the latencies
        that are known, queue and TTFT from the request's arrival, decode from its first token."""
        if self.stream is None:
            return {}
        outputs = [*self.stream.last_outputs.values()]
        cached = {output.request_id: output.num_cached_tokens for output in outputs}
        totals = {
            "model": self.model,
            "prompt_tokens": sum(len(job.token_ids) for job in self.stream.jobs),
            "cached_tokens": sum(cached.values()),
            "completion_tokens": sum(output.num_output_tokens for output in outputs),
        }
        if outputs:
            arrival, begun, first, last = phases_of(outputs)
            reasons = sorted({output.finish_reason or "abort" for output in outputs})
            totals |= {
                "finish_reason": ",".join(reasons),
                "queue_seconds": begun - arrival,
                "ttft_seconds": first - arrival,
                "decode_seconds": last - first,
            }
        return totals


def new_request_id() -> str:
    return uuid.uuid4().hex


def record_of(request: Request | Scope) -> RequestRecord:
    """The record that the middleware made of a request; without the middleware a new one."""
    scope: Any = request.scope if isinstance(request, Request) else request
    if RECORD_KEY not in scope:
        scope[RECORD_KEY] = RequestRecord(new_request_id(), scope["method"], scope["path"], "")
    return scope[RECORD_KEY]
