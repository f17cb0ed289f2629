"""HTTP middleware: size limits, host check, API keys, per-key concurrency limits."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import Counter, deque
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..loop.retry_after import RetryAfter
from ..protocol.errors import ApiError, TooMany, error_response
from ..protocol.server_options import ServerOptions
from .tenant import set_tenant

_log = logging.getLogger(__name__)

DISCARD_SECONDS = 2.0
"""How long an oversized body is still read, so that the client gets to read the 413 response."""


class RequestMiddleware:
    """ASGI middleware that checks and buffers each request, limits concurrency per API key, and counts
    responses by status.

    Reading health probes and the page's static files needs no key; only POST has a body.
    """

    OPEN_PATHS = frozenset({"/", "/health", "/ready"})
    OPEN_PREFIX = "/page/"
    ABORT_PATH = "/abort"

    def __init__(self, app: ASGIApp, options: ServerOptions, count: Counter[int]) -> None:
        self._app = app
        self._options = options
        self._count = count
        self._expected = [f"Bearer {key}".encode() for key in options.api_keys]
        self._limiters = [ConcurrencyLimiter(options) for _ in self._expected or [b""]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._handle(scope, receive, self._counting(send))

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_headers(scope)
            self._check_host(scope)
            # Only POST starts work; the rest reads or aborts, and needs no concurrency permit.
            key = self._key(scope)
            set_tenant(scope, key)
            is_work = scope["method"] == "POST" and scope["path"] != self.ABORT_PATH
            limiter = self._limiters[key] if is_work else None
            body = await self._body(scope, receive)
            if body is None:
                return
            if self._options.log_prompts and body:
                # As JSON: a newline in a path or a body must not look like another line of the log.
                _log.info("%s", json.dumps([scope["path"], body.decode(errors="replace")]))
            if limiter is not None and not await limiter.acquire(receive):
                return
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            if limiter is not None:
                limiter.release()

    def _counting(self, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count[message["status"]] += 1
            await send(message)

        return counted

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if size > self._options.max_header_bytes:
            raise ApiError(
                431,
                f"request line and headers take {size} bytes: the limit is "
                f"{self._options.max_header_bytes}",
                code="headers_too_large",
            )

    def _check_host(self, scope: Scope) -> None:
        names = self._options.host_names
        host = Headers(scope=scope).get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if names is None or name in ("localhost", *names) or _is_address(name):
            return
        raise ApiError(
            421,
            "the Host header must be an address or localhost; --allowed-host adds a name",
            code="unknown_host",
        )

    def _key(self, scope: Scope) -> int:
        """Index of the request's API key, OpenAI's header or Anthropic's, compared in constant time."""
        if not self._expected:
            return 0
        headers = Headers(scope=scope)
        header = headers.get("authorization", "").encode("latin-1")
        if not header and (given := headers.get("x-api-key")) is not None:
            header = b"Bearer " + given.encode("latin-1")
        matches = [hmac.compare_digest(header, key) for key in self._expected]
        if any(matches):
            return matches.index(True)
        is_open = scope["path"] in self.OPEN_PATHS or scope["path"].startswith(self.OPEN_PREFIX)
        if is_open and scope["method"] in ("GET", "HEAD"):
            return 0
        raise ApiError(
            401,
            "the API key is missing or wrong",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the request's body; None if the client disconnected first.

        Raises:
            ApiError: the body is too large, or takes too long.
        """
        if scope["method"] in ("GET", "HEAD"):
            return b""
        max_bytes = self._options.max_body_bytes
        # h11 has validated that it is a number.
        declared = int(Headers(scope=scope).get("content-length", 0))
        chunks: list[bytes] = []
        num_bytes, has_more = 0, True
        try:
            async with asyncio.timeout(self._options.body_timeout_seconds):
                while has_more and max(num_bytes, declared) <= max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    num_bytes += len(chunks[-1])
                    has_more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request was not complete after {self._options.body_timeout_seconds:g} s",
                code="timeout",
                headers={"Connection": "close"},
            ) from None
        if max(num_bytes, declared) <= max_bytes:
            return b"".join(chunks)
        if has_more:
            await _discard(receive)
        raise ApiError(
            413,
            f"the body is larger than the limit of {max_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class ConcurrencyLimiter:
    """Per-key concurrency limit with a bounded FIFO queue."""

    def __init__(self, options: ServerOptions) -> None:
        self._limit = options.max_concurrency_per_key
        self._max_queue = options.max_queue_per_key
        self._num_active = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._retry_after = RetryAfter()

    async def acquire(self, receive: Receive) -> bool:
        """Wait for a permit, which `release` returns; False, without one, if the client disconnects first.

        Raises:
            TooMany: the queue is full.
        """
        if self._limit is None or self._num_active < self._limit:
            self._num_active += 1
            return True
        if len(self._queue) >= self._max_queue:
            raise TooMany(
                f"this key has {self._num_active} requests running and {len(self._queue)} waiting, its "
                "limit: try again later",
                self._retry_after.retry_after(len(self._queue) + 1),
            )
        permit = asyncio.get_running_loop().create_future()
        self._queue.append(permit)
        # The body has been read, so the only message left to receive is the disconnect.
        disconnected = asyncio.ensure_future(receive())
        is_admitted = False
        try:
            await asyncio.wait({permit, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            is_admitted = permit.done() and not disconnected.done()
            return is_admitted
        finally:
            disconnected.cancel()
            if not permit.done():
                self._queue.remove(permit)
            elif not is_admitted:
                self._admit_next()

    def release(self) -> None:
        """Return a permit and admit the next waiting request."""
        self._retry_after.record_finish()
        self._admit_next()

    def _admit_next(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self._num_active -= 1


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that yields the buffered body, then later messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass
