"""What servers say of themselves, from the answers that vLLM, llama.cpp, exporters and silent servers give."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from llmopt.bench.load.address import Address, server_facts

VLLM = {
    "/v1/models": '{"object": "list", "data": [{"id": "served", "root": "org/model", "owned_by": "vllm"}]}',
    "/version": '{"version": "0.30.0"}',
    "/metrics": '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="served"} 0.0\n',
}
LLAMA_CPP = {
    "/v1/models": '{"object": "list", "data": [{"id": "model.gguf"}]}',
    "/props": '{"build_info": "b9000-abc", "model_path": "model.gguf"}',
}
DCGM = (
    "# TYPE DCGM_FI_DEV_SM_CLOCK gauge\n"
    'DCGM_FI_DEV_SM_CLOCK{gpu="0",modelName="NVIDIA H100"} 1980\n'
    'DCGM_FI_DEV_SM_CLOCK{gpu="1",modelName="NVIDIA H100"} 1980\n'
)


@contextmanager
def server(answers: Mapping[str, str]) -> Iterator[Address]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path, "").encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        yield Address.parse(f"http://127.0.0.1:{httpd.server_port}")
        httpd.shutdown()


@pytest.mark.parametrize(
    ("answers", "model", "version", "gpu"),
    [
        (VLLM, "org/model", "0.30.0", None),
        (VLLM | {"/metrics": DCGM}, "org/model", "0.30.0", "NVIDIA H100"),
        (LLAMA_CPP, "model.gguf", "b9000-abc", None),
        ({}, None, None, None),
        ({"/version": "0.30", "/metrics": "not { metrics"}, None, None, None),
        ({"/version": '["0.30"]', "/v1/models": "[]"}, None, None, None),
    ],
)
def test_a_server_says_what_it_says(answers, model, version, gpu) -> None:
    with server(answers) as address:
        assert server_facts(address) == {"model": model, "version": version, "gpu": gpu}


def test_no_server_says_nothing() -> None:
    facts = server_facts(Address.parse("http://127.0.0.1:9"))
    assert set(facts.values()) == {None}
