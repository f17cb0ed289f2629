"""Log lines as text or JSON, the outermost middleware, which writes one for each request, and OpenTelemetry
traces over OTLP/HTTP: a span a request, named and attributed as vLLM's `llm_request`.

Every log line has the id of the request that it belongs to.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import time
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, TextIO
from urllib.parse import quote, urlsplit, urlunsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.logging import DefaultFormatter

from ....quant.base.errors import BadInput
from ....quant.base.extras import import_extra
from ..protocol.generation_protocol import REQUEST_ID
from ..protocol.server_options import LogFormat
from .request_record import CURRENT, RequestRecord, Totals, new_request_id, set_record

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
_PATIENCE_SECONDS = 0.1
"""For the reader of a full pipe, before the first line is dropped."""
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
        event = record.msg if isinstance(record.msg, LogEvent) else None
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
    """Writes to `sys.stderr` as it is at each line: a process may replace it after the server's start.

    Lines that nobody takes are dropped, and counted in the next one that somebody does: who starts a server
    with a pipe and does not read it would find it standing still once the pipe is full.
    """

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
    """Whether 4 kB can be written to a stream without waiting, at the latest after so many seconds."""
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
            # A timer, cancelled, keeps the request's context until it is due, and that the record.
            record.stream = None
            seconds = time.perf_counter() - record.began
            if record.reservation is not None:
                record.reservation.settle(totals.prompt_tokens + totals.completion_tokens)
            if record.principal is not None:
                record.principal.usage.update(
                    requests=1,
                    prompt_tokens=totals.prompt_tokens,
                    generation_tokens=totals.completion_tokens,
                )
            if self._tracing is not None and span is not None:
                self._tracing.end(span, record, totals)
            if _access.isEnabledFor(logging.INFO):
                _access.info(AccessLine("request", _fields(record, totals, seconds)))

    def _respond(self, record: RequestRecord, message: Message) -> None:
        record.status = message["status"]
        self._count[message["status"]] += 1
        added = [(b"x-request-id", record.request_id.encode())]
        if record.ignored:
            added.append((b"x-ignored-fields", ", ".join(record.ignored).encode()))
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


TRACES_PATH = "/v1/traces"
FLUSH_SECONDS = 5.0
"""How long the shutdown waits for the collector."""
_PROTOCOL = "http/protobuf"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def check_tracing(endpoint: str) -> str:
    """The URL that spans are posted to; an address without a path gets OTLP's `/v1/traces`.

    Raises:
        BadInput: no HTTP URL, another protocol in the environment, or OpenTelemetry is not installed.
    """
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or True)
    except ValueError:
        is_url = False
    if not is_url:
        raise BadInput(
            f"--otlp-traces-endpoint {endpoint}: give a URL such as http://localhost:4318/v1/traces"
        )
    for name in _PROTOCOL_VARIABLES:
        if os.environ.get(name, _PROTOCOL) != _PROTOCOL:
            raise BadInput(f"{name}={os.environ[name]}: traces are sent as {_PROTOCOL} alone")
    for module in ("exporter.otlp.proto.http.trace_exporter", "sdk.trace"):
        import_extra("--otlp-traces-endpoint", "otel", f"opentelemetry.{module}")
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else urlunsplit(parts._replace(path=TRACES_PATH))


class Tracing:
    """Spans of requests, exported by a background thread in batches. The queue is bounded: spans are dropped
    where the collector does not answer. `OTEL_...` variables (service name, headers, sampler) apply."""

    def __init__(self, endpoint: str) -> None:
        """Raises `BadInput` as `check_tracing`."""
        url = check_tracing(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()  # from the environment
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "llmopt"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=FLUSH_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("llmopt", version("llmopt"))
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> Any:
        """The span of a request, a child of the client's where it sent a W3C `traceparent`."""
        from opentelemetry.trace import SpanKind

        names = ("traceparent", "tracestate")
        carrier = {name: headers[name] for name in names if name in headers}
        span = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            start_time=time.time_ns() - _nanoseconds_since(record.began),
        )
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        return span

    def end(self, span: Any, record: RequestRecord, totals: Totals) -> None:
        from opentelemetry.trace import StatusCode

        end_time = None
        if span.is_recording():
            # By the clock of the durations, which no correction of the wall clock moves.
            end_time = span.start_time + _nanoseconds_since(record.began)
            attributes = _attributes(record, totals)
            span.set_attributes({k: v for k, v in attributes.items() if v is not None})
            if record.status is None or record.status >= 500:
                span.set_status(StatusCode.ERROR)
        span.end(end_time)

    def close(self) -> None:
        """Export what is left, for at most `FLUSH_SECONDS`; blocks."""
        self._provider.force_flush(int(FLUSH_SECONDS * 1000))
        self._provider.shutdown()


def _nanoseconds_since(began: float) -> int:
    return round((time.perf_counter() - began) * 1e9)


def _attributes(record: RequestRecord, totals: Totals) -> dict[str, Any]:
    """vLLM's attributes of a request, and OpenTelemetry's of the HTTP exchange."""
    params = record.params
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "gen_ai.request.id": record.response_id or record.request_id,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "llmopt.request_id": record.request_id,
        "llmopt.key": record.key,
    }
    if params is not None:
        attributes |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }
    if totals.prompt_tokens:
        attributes |= {
            "gen_ai.usage.prompt_tokens": totals.prompt_tokens,
            "gen_ai.usage.completion_tokens": totals.completion_tokens,
            "gen_ai.usage.cached_tokens": totals.cached_tokens,
            "gen_ai.response.finish_reasons": totals.finish_reasons,
            "gen_ai.latency.time_in_queue": totals.queue_seconds,
            "gen_ai.latency.time_to_first_token": totals.ttft_seconds,
            "gen_ai.latency.e2e": totals.e2e_seconds,
            "gen_ai.latency.time_in_model_prefill": totals.prefill_seconds,
            "gen_ai.latency.time_in_model_decode": totals.decode_seconds,
            "gen_ai.latency.time_in_model_inference": None
            if totals.prefill_seconds is None or totals.decode_seconds is None
            else totals.prefill_seconds + totals.decode_seconds,
        }
    return attributes
