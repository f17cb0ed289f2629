"""Outermost ASGI middleware: request id and record, response headers, access line, usage and span."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..protocol.protocol import REQUEST_ID
from .access_line import AccessLine
from .request_record import RequestRecord, Totals, new_request_id, set_record
from .tracing import Tracing

_access = logging.getLogger("llmopt.access")


class ObservingMiddleware:
    """Makes a `RequestRecord` of each request, and reports it once the response has ended.

    Every response has an `x-request-id`: the client's, where that is well-formed, or a random one. Responses
    to keys with limits have OpenAI's `x-ratelimit-...` headers.
    """

    def __init__(self, app: ASGIApp, count: Counter[int], tracing: Tracing | None) -> None:
        self._app = app
        self._count = count
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = _record(scope, headers)
        set_record(scope, record)
        span = None
        if self._tracing is not None and scope["method"] == "POST":
            span = self._tracing.begin(record, headers)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._respond(record, message)
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        finally:
            totals = record.totals()
            seconds = time.perf_counter() - record.began
            if record.reservation is not None:
                record.reservation.settle(totals.prompt_tokens + totals.completion_tokens)
            if record.principal is not None:
                record.principal.usage.record(totals.prompt_tokens, totals.completion_tokens)
            if self._tracing is not None and span is not None:
                self._tracing.end(span, record, totals)
            if _access.isEnabledFor(logging.INFO):
                _access.info(AccessLine("request", _fields(record, totals, seconds)))

    def _respond(self, record: RequestRecord, message: Message) -> None:
        record.status = message["status"]
        self._count[message["status"]] += 1
        added = [(b"x-request-id", record.request_id.encode())]
        if record.principal is not None:
            added += record.principal.limits.headers()
        message["headers"] = [*message.get("headers", ()), *added]


def _record(scope: Scope, headers: Headers) -> RequestRecord:
    given = headers.get("x-request-id", "")
    request_id = given if re.fullmatch(REQUEST_ID, given) else new_request_id()
    client = scope.get("client")
    return RequestRecord(
        request_id,
        scope["method"],
        quote(scope["path"]),
        f"{client[0]}:{client[1]}" if client else "",
    )


def _fields(record: RequestRecord, totals: Totals, seconds: float) -> dict[str, Any]:
    """The access line's fields; those that a request does not have are left out."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "response_id": record.response_id,
        "key": record.key,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": seconds,
    }
    if totals.prompt_tokens:
        fields |= {
            "model": record.model,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "completion_tokens": totals.completion_tokens,
            "finish_reason": ",".join(totals.finish_reasons) or None,
            "queue_seconds": totals.queue_seconds,
            "ttft_seconds": totals.ttft_seconds,
            "decode_seconds": totals.decode_seconds,
        }
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }
