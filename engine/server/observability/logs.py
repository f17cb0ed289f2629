"""Log lines as text or as JSON objects: one a line, each with the id of the request that it belongs to."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from uvicorn.logging import DefaultFormatter

from .request_record import CURRENT

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")

LEVELS = {
    "llmopt": logging.INFO,
    "uvicorn": logging.WARNING,
    "uvicorn.error": logging.WARNING,
    "asyncio": logging.WARNING,
    "opentelemetry": logging.WARNING,
    "py.warnings": logging.WARNING,
}
_BASE64 = re.compile(rb"[A-Za-z0-9+/=\\]{1024,}")
"""With the backslash that some clients write before a slash."""
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_CONTROL |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


@dataclass(frozen=True, slots=True)
class Event:
    """A log message with fields. As text, its name and the fields as JSON; as JSON, fields of the object."""

    name: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name} {json.dumps(self.fields, default=str)}"


def body_text(body: bytes) -> str:
    """A request's body for the log: of images in base64 their begin and length."""
    return _BASE64.sub(_shortened, body).decode(errors="replace")


def _shortened(run: re.Match[bytes]) -> bytes:
    return run[0][:32] + b"... (%d characters)" % len(run[0])


class TextFormatter(DefaultFormatter):
    """uvicorn's lines. Control characters of a message are escaped, so that it stays one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record, request = copy(record), CURRENT.get()
        record.message = record.getMessage().translate(_CONTROL)
        if request is not None:
            record.message += f" [{request.request_id}]"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts` (ISO 8601, UTC), `level`, `logger`, `message`, `request_id`, `key` and
    `trace_id` within a request, the fields of an `Event`, and `exception` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event = record.msg if isinstance(record.msg, Event) else None
        line["message"] = record.getMessage() if event is None else event.name
        if (request := CURRENT.get()) is not None:
            line |= {"request_id": request.request_id, "key": request.key}
            if request.trace_id is not None:
                line["trace_id"] = request.trace_id
        if event is not None:
            line |= event.fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(form: LogFormat) -> None:
    """Log the server's and uvicorn's lines to stderr in that format. There are no bodies in them, hence no
    prompts, unless `log_prompts` is set."""
    handler = _StderrHandler()
    handler.setFormatter(
        JsonFormatter() if form == "json" else TextFormatter("%(levelprefix)s %(message)s")
    )
    logging.captureWarnings(form == "json")
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class _StderrHandler(logging.Handler):
    """Writes to `sys.stderr` as it is at each line: a process may replace it after the server's start."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)
