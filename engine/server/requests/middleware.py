"""HTTP middleware: size limits, host and origin checks, API keys, HEAD wherever there is GET;
and routes that read large bodies off the event loop."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Coroutine
from functools import partial
from ipaddress import ip_address
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..protocol.body import parsed
from ..protocol.errors import ApiError, error_response
from ..protocol.server_options import ServerOptions
from .observe import LogEvent, body_text
from .request_record import FULL_KEY, WRITE_KEY, KeyRing, Principal, RequestRecord, record_of

_log = logging.getLogger(__name__)

MAX_VALUES, MAX_OPENED, MAX_NAMES = 2**20, 2**17, 2**17
"""Values of a body at most, lists and objects, and names of fields; the first two may be as many as a context
that is longer. Python's lock is held while they are read and freed, and 14 MiB of small lists would silence
every other client for seconds."""

PROBES = frozenset({"/health", "/ready", "/metrics", "/engine/state"})
"""Paths for which the server has connections in reserve."""

BODIES_PER_KEY = 16
"""Bodies of the largest size, or their bytes in smaller ones, that a key may have in memory at a time."""


class RequestMiddleware:
    """ASGI middleware that checks and buffers each request. Reading health probes and the page's static files
    needs no key; only POST has a body."""

    OPEN_PATHS = frozenset({"/", "/health", "/ready"})
    OPEN_PREFIX = "/page/"
    ADMIN_PATHS = frozenset(
        {"/metrics", "/engine/state", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    )

    def __init__(
        self, app: ASGIApp, options: ServerOptions, keys: KeyRing, max_model_len: int
    ) -> None:
        self._app = app
        self._options = options
        self._keys = keys
        names = options.host_names
        self._hosts = None if names is None else {"localhost", *map(str.lower, names)}
        self._max_values = max(MAX_VALUES, 2 * max_model_len)
        self._max_opened = max(MAX_OPENED, max_model_len)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, body = record_of(scope), None
        try:
            try:
                self._check_host(scope)
                self._check_origin(scope)
                record.principal = self._principal(scope)
                self._check_share(scope, record)
                body = await self._body(scope, receive, record)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
            if self._options.log_prompts and body:
                # As JSON: a newline in a path or a body must not look like another line of the log.
                is_large = len(body) > MAX_ON_LOOP
                text = await asyncio.to_thread(body_text, body) if is_large else body_text(body)
                _log.info(LogEvent("request body", {"path": scope["path"], "body": text}))
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        finally:
            record.let_go()

    def _check_share(self, scope: Scope, record: RequestRecord) -> None:
        if scope["path"] in PROBES:
            return
        if scope.get(FULL_KEY):
            headers = {"Retry-After": "1"}
            raise ApiError(
                503, "too many connections", code="too_many_connections", headers=headers
            )
        record.hold("open requests", 1, self._options.share_of_key(self._options.max_connections))

    def _check_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host", "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if self._hosts is None or name in self._hosts:
            return
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            problem = "the Host header must be an address or localhost; --allowed-host adds a name"
            raise ApiError(421, problem, code="unknown_host") from None

    def _check_origin(self, scope: Scope) -> None:
        """Refuse a POST that a browser sends for another site's page without asking first: one whose type is
        not JSON. With JSON it asks, and CORS answers."""
        headers = Headers(scope=scope)
        origin, kind = headers.get("origin"), headers.get("content-type", "")
        if scope["method"] != "POST" or origin is None or "json" in kind.partition(";")[0]:
            return
        own = origin.partition("://")[2] == headers.get("host", "")
        if not own and not {"*", origin} & {*self._options.cors_origins}:
            need = "Content-Type: application/json, and be of an origin that --cors-origin allows"
            raise ApiError(400, f"a page of {origin} has to send {need}", code="foreign_origin")

    def _principal(self, scope: Scope) -> Principal | None:
        """Whose key the request has, in OpenAI's header or Anthropic's; None for open paths without one.
        Raises `ApiError`: no valid key, or one that may not ask for this path."""
        headers = Headers(scope=scope)
        header = headers.get("authorization", "").encode("latin-1")
        scheme, _, secret = header.partition(b" ")
        if scheme.lower() != b"bearer":  # RFC 9110, 11.1: the scheme is case-insensitive
            secret = b""
        if not header and (given := headers.get("x-api-key")) is not None:
            secret = given.encode("latin-1")
        path = scope["path"]
        if (principal := self._keys.find(secret)) is not None:
            if path in self.ADMIN_PATHS and not principal.is_admin:
                raise ApiError(403, f"{path} needs an admin's API key", code="not_an_admin")
            return principal
        is_open = path in self.OPEN_PATHS or path.startswith(self.OPEN_PREFIX)
        if is_open and scope["method"] in ("GET", "HEAD"):
            return None
        headers = {"WWW-Authenticate": "Bearer"}
        problem = "the API key is missing or wrong"
        raise ApiError(401, problem, code="invalid_api_key", headers=headers)

    async def _body(self, scope: Scope, receive: Receive, record: RequestRecord) -> bytes | None:
        """Read the request's body; None if the client disconnected first. Raises `ApiError`: the body is too
        large, or takes too long, or its key has too many in memory."""
        if scope["method"] in ("GET", "HEAD"):
            return b""
        max_bytes = self._options.max_body_bytes
        # h11 has validated that it is a number.
        declared = int(Headers(scope=scope).get("content-length", 0))
        chunks: list[bytes] = []
        outline, num_bytes, has_more = Outline(), 0, True
        problem: str | None = None
        encoding = Headers(scope=scope).get("content-encoding", "identity").lower()
        if encoding == "gzip":
            receive = unpacked(receive)
        elif encoding != "identity":
            raise ApiError(415, f"Content-Encoding: {encoding} is not read: send gzip, or none")
        try:
            async with asyncio.timeout(self._options.body_timeout_seconds):
                while has_more and max(num_bytes, declared) <= max_bytes and problem is None:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    chunks.append(chunk)
                    num_bytes += len(chunk)
                    problem = outline.add(chunk, self._max_values, self._max_opened)
                    record.hold("bytes of bodies", len(chunk), BODIES_PER_KEY * max_bytes)
                    has_more = message.get("more_body", False)
        except TimeoutError:
            problem = f"the request was not complete after {self._options.body_timeout_seconds:g} s"
            raise ApiError(408, problem, code="timeout") from None
        except zlib.error as error:
            raise ApiError(400, f"the body is not gzip: {error}") from None
        if max(num_bytes, declared) > max_bytes:
            problem = f"is larger than the limit of {max_bytes} bytes"
        if problem is None:
            return b"".join(chunks)
        raise ApiError(413, f"the body {problem}", code="body_too_large")


def unpacked(receive: Receive) -> Receive:
    """An ASGI `receive` that unpacks a gzip body, 64 KiB at a time. It raises `zlib.error`."""
    inflate, has_more = zlib.decompressobj(16 + zlib.MAX_WBITS), True

    async def receive_unpacked() -> Message:
        nonlocal has_more
        data = inflate.unconsumed_tail
        if data:
            await asyncio.sleep(0)  # a turn for others
        elif has_more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            data, has_more = message.get("body", b""), message.get("more_body", False)
        body = inflate.decompress(data, 1 << 16)
        is_more = bool(inflate.unconsumed_tail) or has_more
        return {"type": "http.request", "body": body, "more_body": is_more}

    return receive_unpacked


class Outline:
    """Counts of what a JSON body has outside of its strings, made while it arrives."""

    def __init__(self) -> None:
        self._is_inside, self._escape = 0, b""
        self._num_values = self._num_opened = self._num_names = 0

    def add(self, data: bytes, max_values: int, max_opened: int) -> str | None:
        """Count the next bytes; returns what there is too much of."""
        text = (self._escape + data).replace(rb"\\", b"").replace(rb"\"", b"")
        self._escape = text[-1:] if text.endswith(b"\\") else b""
        parts = text.split(b'"')
        outside = b"".join(parts[self._is_inside :: 2])
        self._is_inside = (self._is_inside + len(parts) - 1) % 2
        self._num_values += outside.count(b",")
        self._num_opened += outside.count(b"[") + outside.count(b"{")
        self._num_names += outside.count(b":")
        if self._num_opened > max_opened:
            return f"holds more than {max_opened} lists and objects: send fewer parts"
        if self._num_values > max_values:
            return f"holds more than {max_values} values: send fewer prompts or ids"
        if self._num_names > MAX_NAMES:
            return f"holds more than {MAX_NAMES} names of fields: send fewer fields"
        return None


MAX_ON_LOOP = 32 * 1024
"""Bytes of a body that is read on the event loop: it takes a few milliseconds at most."""


class BodyRoute(APIRoute):
    """A route that parses and validates a body, on a worker thread if it is large.

    FastAPI finds the validated model in place of the JSON.

    Attributes:
        takes_any_type: True if a body is JSON whatever its Content-Type says, as for Ollama's clients.
    """

    takes_any_type = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field
        model = None if field is None else field.field_info.annotation

        async def read(request: Request) -> Response:
            headers = request.scope["headers"]
            if self.takes_any_type:
                headers = [pair for pair in headers if pair[0] != b"content-type"]
                headers.append((b"content-type", b"application/json"))
                request = Request({**request.scope, "headers": headers}, request.receive)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            is_json = kind.startswith("application/") and kind.endswith(("/json", "+json"))
            if isinstance(model, type) and issubclass(model, BaseModel):
                body = await request.body()
                if body and not is_json:  # curl's -d sends application/x-www-form-urlencoded
                    problem = f"the body is of type {kind or 'nothing'}, and JSON is read"
                    remedy = "send the header Content-Type: application/json"
                    raise ApiError(400, f"{problem}: {remedy}", code="unsupported_media_type")
                read_body = partial(parsed, model, body)
                if len(body) <= MAX_ON_LOOP:
                    request._json = read_body()
                else:
                    workers = request.app.state.service.workers
                    request._json = await workers.run(record_of(request).tenant, read_body)
            return await handle(request)

        return read


class JsonRoute(BodyRoute):
    """A route of Ollama's API, many of whose clients name no Content-Type."""

    takes_any_type = True


def _replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that yields the buffered body, then later messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


class HeadMiddleware:
    """Sends the status and headers that GET has, and ends the response there: a stream never does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        started = asyncio.get_running_loop().create_future()

        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                started.set_result(None)

        getting = asyncio.ensure_future(
            self._app({**scope, "method": "GET", WRITE_KEY: None}, receive, start)
        )
        try:
            await asyncio.wait({getting, started}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                getting.result()
        finally:
            getting.cancel()
            await asyncio.wait({getting})
            if not getting.cancelled():
                getting.exception()  # the response has begun: its log line is the app's
        await send({"type": "http.response.body"})
