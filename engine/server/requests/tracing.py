"""OpenTelemetry traces over OTLP/HTTP: a span a request, named and attributed as vLLM's `llm_request`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ....quant.base.errors import BadInput
from .request_record import RequestRecord, Totals

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
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise BadInput(
            f"--otlp-traces-endpoint needs the package {error.name}: pip install 'llmopt[otel]'"
        ) from error
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
            start_time=time.time_ns() - round((time.perf_counter() - record.began) * 1e9),
        )
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        return span

    def end(self, span: Any, record: RequestRecord, totals: Totals) -> None:
        from opentelemetry.trace import StatusCode

        if span.is_recording():
            attributes = _attributes(record, totals)
            span.set_attributes({k: v for k, v in attributes.items() if v is not None})
            if record.status is None or record.status >= 500:
                span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Export what is left, for at most `FLUSH_SECONDS`; blocks."""
        self._provider.force_flush(int(FLUSH_SECONDS * 1000))
        self._provider.shutdown()


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
