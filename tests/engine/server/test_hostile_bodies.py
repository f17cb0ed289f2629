"""Malformed and hostile bodies: every endpoint responds, and never with 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ...support.live_server import RunningServer

CHAT = [{"role": "user", "content": "hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/abort": {"id": "nobody"},
}
MEGABYTE = 1 << 20


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def answer(http: httpx.Client, path: str, content: bytes) -> tuple[int, dict[str, Any]]:
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, response.text
    found = response.json()
    if response.status_code >= 400:
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert len(found["error"]["message"]) < 2000
    return response.status_code, found


@pytest.mark.parametrize("path", RIGHT)
def test_broken_bodies(http: httpx.Client, path: str) -> None:
    right = json.dumps(RIGHT[path]).encode()
    for content in (
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        right[:-1],
        right + b"}",
        b"\xff\xfe" + right,
        right.replace(b"hi", b"\xc3\x28").replace(b"nobody", b"\xc3\x28").replace(b"5", b"\xff"),
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"\x00" * 1000,
    ):
        assert answer(http, path, content)[0] == 400, content[:40]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1e400", "-3"])
def test_numbers_that_are_none(http: httpx.Client, value: str) -> None:
    for name in (
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "n", "logprobs", "best_of",
    ):  # fmt: skip
        content = f'{{"prompt": "hi", "{name}": {value}}}'.encode()
        status, found = answer(http, "/v1/completions", content)
        # -3 is a penalty's lowest value and less, and top_k's "off" is -1.
        assert status == 400, (name, found)
    for bias in (f'{{"5": {value}}}', f'{{"{value}": 1}}'):
        content = f'{{"prompt": "hi", "max_tokens": 1, "logit_bias": {bias}}}'.encode()
        status, _ = answer(http, "/v1/completions", content)
        assert status == (200 if bias == '{"5": -3}' else 400)


def test_a_megabyte_of_stop_strings(http: httpx.Client) -> None:
    for stop in ("x" * MEGABYTE, ["x" * MEGABYTE], ["ab"] * (MEGABYTE // 2), [""] * MEGABYTE):
        content = json.dumps({"prompt": "hi", "stop": stop}).encode()
        status, found = answer(http, "/v1/completions", content)
        assert status == 400 and found["error"]["param"] == "stop"
    # As many as are allowed, and as long, cost a stream next to nothing.
    most = [f"{index:02}" + "y" * 1022 for index in range(64)]
    content = json.dumps({"prompt": "hi", "max_tokens": 50, "stop": most}).encode()
    assert answer(http, "/v1/completions", content)[0] == 200


def test_huge_bodies(http: httpx.Client, server: RunningServer) -> None:
    long = "word " * (MEGABYTE // 5)
    assert answer(http, "/v1/completions", json.dumps({"prompt": long}).encode())[0] == 400
    many = {"prompt": ["a"] * 100_000, "max_tokens": 1}
    assert answer(http, "/v1/completions", json.dumps(many).encode())[0] in (400, 429)
    assert answer(http, "/v1/completions", b" " * (17 * MEGABYTE))[0] == 413
    bias = {str(index): 1 for index in range(100_000)}
    body = {"prompt": "hi", "logit_bias": bias}
    assert answer(http, "/v1/completions", json.dumps(body).encode())[0] == 400
    assert server.wait_until_idle().kv_blocks_used == 0


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(a{1,1000}){1,1000}" * 20},
        {"regex": "(" * 5000},
        {"grammar": "start: " + "a " * 50_000},
        {"grammar": "start: start start | \"a\""},
        {"choice": ["x" * 1000] * 2000},
        {"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
        {"json": {"type": "string", "minLength": 10**9}},
        {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
        {"json": {"allOf": [{"anyOf": [{"const": i} for i in range(60)]} for _ in range(6)]}},
    ],
)  # fmt: skip
def test_structures_that_would_cost_much(http: httpx.Client, structure: dict[str, Any]) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "structured_outputs": structure}
    assert answer(http, "/v1/completions", json.dumps(body).encode())[0] in (200, 400)


@pytest.mark.parametrize("depth", [130, 900, 3000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/responses"])
def test_schemas_that_are_nested_deep(server: RunningServer, path: str, depth: int) -> None:
    schema = '{"properties":{"a":' * depth + '{"type":"integer"}' + "}}" * depth
    form = '{"type": "json_schema", "json_schema": {"name": "x", "schema": ' + schema + "}}"
    fields = {
        "/v1/chat/completions": f'"messages": {json.dumps(CHAT)}, "response_format": {form}',
        "/api/chat": f'"messages": {json.dumps(CHAT)}, "format": {schema}',
        "/v1/responses": f'"input": "a", "text": {{"format": {{"type": "json_schema", "name": "x", "schema": {schema}}}}}',
    }
    content = f'{{"model": "tiny", {fields[path]}}}'
    with server.http(headers={"Content-Type": "application/json"}) as http:
        assert http.post(path, content=content).status_code == 400
