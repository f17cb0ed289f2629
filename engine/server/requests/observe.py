"""Log lines as text or JSON, and the outermost middleware, which writes one for each request.

Every log line has the id of the request that it belongs to.
"""

from __future__ import annotations

import json
import logging
import re
import select
import sys
import time
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.logging import DefaultFormatter

from ..protocol.generation_protocol import REQUEST_ID
from ..protocol.server_options import LogFormat
from .request_record import CURRENT, RECORD_KEY, RequestRecord, new_request_id

_OTHERS = ("uvicorn", "uvicorn.error", "asyncio", "py.warnings")
LEVELS = {"llmopt": logging.INFO, **dict.fromkeys(_OTHERS, logging.WARNING)}
_PIECES = re.compile(
    rb"(?P<run>[A-Za-z0-9+/=\\]{1024,})"
    rb"|(?:[A-Za-z0-9+/=\\]{0,1023}[^A-Za-z0-9+/=\\]){1,256}|[A-Za-z0-9+/=\\]+"
)
"""A long run of base64, also with the backslash that some clients write before a slash, or up to 256 KiB of
shorter words: a thread that reads a body piece by piece lets the others in between."""
MAX_LOGGED_BYTES = 1 << 20
"""Bytes of a body in the log, once images are left out."""
_PATIENCE_SECONDS = 0.1
"""Seconds to wait for the reader of a full pipe before the first line is dropped."""
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_CONTROL |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A log message with fields. As text, its name and the fields as JSON; as JSON, fields of the object."""

    name: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name} {json.dumps(self.fields, default=str)}"


def body_text(body: bytes) -> str:
    """A request's body for the log: of images in base64 their begin and length."""
    short = bytearray()
    for piece in _PIECES.finditer(body):
        run = piece["run"]
        short += piece[0] if run is None else run[:32] + b"... (%d characters)" % len(run)
        if len(short) > MAX_LOGGED_BYTES:
            short[MAX_LOGGED_BYTES:] = b"... (of %d bytes)" % len(body)
            break
    return short.decode(errors="replace")


class TextFormatter(DefaultFormatter):
    """uvicorn's lines. Control characters of a message are escaped, so that it stays one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record, request = copy(record), CURRENT.get()
        record.message = record.getMessage().translate(_CONTROL)
        if request is not None:
            record.message += f" [{request.request_id}]"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts` (ISO 8601, UTC), `level`, `logger`, `message`, `request_id` and `key`
    within a request, the fields of an `Event`, and `exception` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event = record.msg if isinstance(record.msg, LogEvent) else None
        line["message"] = record.getMessage() if event is None else event.name
        if (request := CURRENT.get()) is not None:
            line |= {"request_id": request.request_id, "key": request.key}
        if event is not None:
            line |= event.fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(form: LogFormat) -> None:
    """Log the server's and uvicorn's lines to stderr in that format. There are no bodies in them, hence no
    prompts, unless `log_prompts` is set."""
    handler = _StderrHandler()
    text = TextFormatter("%(levelprefix)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.captureWarnings(form == "json")
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class _StderrHandler(logging.Handler):
    """Writes to `sys.stderr` as it is at each line: a process may replace it after the server's start. Lines
    that nobody takes are dropped, and counted in the next one that somebody does: who starts a server with a
    pipe and does not read it would find it standing still once the pipe is full."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not _takes_a_line(sys.stderr, 0.0 if self._dropped else _PATIENCE_SECONDS):
                self._dropped += 1
                return
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                text = "%d lines of the log are lost: nobody read it"
                level = logging.WARNING
                self.emit(logging.LogRecord(record.name, level, "", 0, text, (dropped,), None))
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


def _takes_a_line(stream: TextIO, seconds: float) -> bool:
    """True if 4 kB can be written to a stream without waiting, at the latest after so many seconds."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # in memory
        return True
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(1000 * seconds))


@dataclass(frozen=True, slots=True)
class AccessLine(LogEvent):
    """The fields of a finished request; as text, uvicorn's access line with seconds, tokens and key."""

    def __str__(self) -> str:
        fields = self.fields
        line = (
            f'{fields.get("client") or "-"} - "{fields["method"]} {fields["path"]}" '
            f"{fields.get('status', '-')} in {fields['seconds']:.3f} s"
        )
        if "prompt_tokens" in fields:
            line += f", {fields['prompt_tokens']} + {fields['completion_tokens']} tokens"
        if "key" in fields:
            line += f", key {fields['key']}"
        return line


_access = logging.getLogger("llmopt.access")


class ObservingMiddleware:
    """Makes a `RequestRecord` of each request, and reports it once the response has ended. Every response has
    an `x-request-id`: the client's, where that is well-formed, or a random one."""

    def __init__(self, app: ASGIApp, count: Counter[int]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, client = Headers(scope=scope).get("x-request-id", ""), scope.get("client")
        record = RequestRecord(
            given if re.fullmatch(REQUEST_ID, given) else new_request_id(),
            scope["method"],
            quote(scope["path"]),
            f"{client[0]}:{client[1]}" if client else "",
        )
        scope[RECORD_KEY] = record
        CURRENT.set(record)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._count[message["status"]] += 1
                added = [(b"x-request-id", record.request_id.encode())]
                if record.ignored:
                    added.append((b"x-ignored-fields", ", ".join(record.ignored).encode()))
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        finally:
            if _access.isEnabledFor(logging.INFO):
                _access.info(AccessLine("request", _fields(record)))
            # A timer, cancelled, keeps the request's context until it is due, and that the record.
            record.stream = None


def _fields(record: RequestRecord) -> dict[str, Any]:
    """The access line's fields; those that a request does not have are left out."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "response_id": record.response_id,
        "key": record.key,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": time.perf_counter() - record.began,
        **record.totals(),
    }
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }
