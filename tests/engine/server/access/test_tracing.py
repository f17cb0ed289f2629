"""OpenTelemetry traces: spans of a server as they arrive at an OTLP/HTTP collector."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from llmopt.cli.main import main
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.observe import check_tracing
from llmopt.quant.base.errors import BadInput
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ....support.live_server import make_engine, running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "the secret prompt"


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.received.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector's address, and the paths and bodies that it got."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.received  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)


def fields(attributes: Any) -> dict[str, Any]:
    return {attribute.key: value(attribute.value) for attribute in attributes}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, Any], list[str]]:
    """The spans of some requests in their order, the resource, and the paths that were posted to."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "n": 2}
    with collector() as (url, received):
        options = ServerOptions(otlp_traces_endpoint=url, api_keys=("sesame",))
        with running(make_engine("stories260K"), options) as server:
            headers = {"x-api-key": "sesame", "X-Request-Id": "abc"}
            with server.http(headers=headers) as http:
                parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
                assert http.post("/v1/completions", json=body, headers=parent).status_code == 200
                streamed = http.post("/v1/completions", json={**body, "stream": True})
                assert "[DONE]" in streamed.text
                assert http.post("/v1/completions", json={"n": 0}).status_code == 400
                assert http.get("/v1/models").status_code == 200
        requests = [ExportTraceServiceRequest.FromString(sent) for _, sent in received]
    groups = [group for request in requests for group in request.resource_spans]
    made = [span for group in groups for scope in group.scope_spans for span in scope.spans]
    made.sort(key=lambda span: span.start_time_unix_nano)
    resource = fields(groups[0].resource.attributes)
    return made, resource, [path for path, _ in received]


def test_spans_arrive_with_vllm_s_attributes(spans) -> None:
    made, resource, paths = spans
    assert set(paths) == {"/v1/traces"} and resource["service.name"] == "llmopt"
    assert [span.name for span in made] == ["llm_request"] * 3  # reading makes none
    whole, streamed, bad = made
    for span in (whole, streamed):
        attributes = fields(span.attributes)
        assert span.kind == span.SPAN_KIND_SERVER
        assert attributes["gen_ai.request.id"] == "cmpl-abc"
        assert attributes["gen_ai.response.model"] == "tiny"
        assert attributes["gen_ai.usage.completion_tokens"] == 10
        assert attributes["gen_ai.usage.prompt_tokens"] > 3
        assert attributes["gen_ai.request.max_tokens"] == 5
        assert attributes["gen_ai.request.temperature"] == 0.5
        assert attributes["gen_ai.request.n"] == 2
        assert attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert attributes["http.response.status_code"] == 200
        assert attributes["llmopt.key"] == "api-key-1"
        latency = {
            name: attributes[f"gen_ai.latency.{name}"]
            for name in (
                "time_in_queue",
                "time_to_first_token",
                "e2e",
                "time_in_model_prefill",
                "time_in_model_decode",
                "time_in_model_inference",
            )
        }
        assert 0 <= latency["time_in_queue"] <= latency["time_to_first_token"] <= latency["e2e"]
        whole_time = latency["time_in_queue"] + latency["time_in_model_inference"]
        assert whole_time == pytest.approx(latency["e2e"])
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert latency["e2e"] < seconds
    attributes = fields(bad.attributes)
    assert attributes["http.response.status_code"] == 400
    assert "gen_ai.usage.prompt_tokens" not in attributes
    text = str(made)
    assert PROMPT not in text and "sesame" not in text


def test_a_client_s_trace_is_continued(spans) -> None:
    continued, *others = spans[0]
    assert (continued.trace_id.hex(), continued.parent_span_id.hex()) == (TRACE, PARENT)
    assert continued.trace_state == "vendor=1"
    assert all(span.trace_id.hex() != TRACE and not span.parent_span_id for span in others)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://otel:4318", "http://otel:4318/v1/traces"),
        ("https://otel/", "https://otel/v1/traces"),
        ("http://otel:4318/custom", "http://otel:4318/custom"),
    ],
)
def test_an_address_without_a_path_gets_otlp_s(endpoint: str, url: str) -> None:
    assert check_tracing(endpoint) == url


@pytest.mark.parametrize("endpoint", ["otel:4317", "grpc://otel:4317", "http://", "http://x:y", ""])
def test_what_is_no_http_url_is_refused(endpoint: str) -> None:
    with pytest.raises(BadInput, match="give a URL such as"):
        check_tracing(endpoint)


def test_another_protocol_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(BadInput, match="http/protobuf alone"):
        check_tracing("http://otel:4318")


def test_without_the_package_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SystemExit) as stopped:
        main(["serve-local", "--port", "0", "--otlp-traces-endpoint", "http://localhost:4318"])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'llmopt[otel]'" in err
