"""What servers say of themselves, from the answers that vLLM, llama.cpp, exporters and silent servers give."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from llmopt.base.errors import BadInput
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


CARDS = [
    {"id": "small", "max_model_len": 512},
    {"id": "large", "max_model_len": 2048},
    {"id": "tuned", "parent": "large", "root": "adapters/tuned"},
]


@pytest.mark.parametrize(
    ("cards", "model", "found"),
    [
        (CARDS, "large", "large"),
        (CARDS, "tuned", "large"),  # an adapter has the context and the tokenizer of its base
        (CARDS, "other", None),
        (CARDS[1:], "other", "large"),  # llama.cpp answers to any name
        (CARDS[1:], None, "large"),
        # vLLM with two values of --served-model-name
        ([{"id": "a", "root": "org/model"}, {"id": "b", "root": "org/model"}], None, "a"),
    ],
)
def test_a_model_of_several_is_found_by_its_name(cards, model, found) -> None:
    with server({"/v1/models": json.dumps({"data": cards})}) as address:
        assert address.model_card(model).get("id") == found
        root = "org/model" if found == "a" else found
        assert server_facts(address, model)["model"] == root
        assert address.listed(model) == (model if model == found else None)


def test_one_of_several_models_must_be_named() -> None:
    with (
        server({"/v1/models": json.dumps({"data": CARDS})}) as address,
        pytest.raises(BadInput, match="lists 3 models: give --model, such as small, large, tuned"),
    ):
        address.model_card()


def test_no_server_says_nothing() -> None:
    facts = server_facts(Address.parse("http://127.0.0.1:9"))
    assert set(facts.values()) == {None}
