"""Bytes of streams: each event is a chunk of its own, and is written as one JSON document would be."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from llmopt.engine.server.endpoints.service import compact_json

from tools.front import Client, processor_seconds

from ...support.live_server import RunningServer

SAID: Any = {"max_tokens": 12, "seed": 3, "temperature": 1.3, "stream": True}
PROMPT = 'Tom said "hé" \\ to'
MESSAGES = [{"role": "user", "content": PROMPT}]


def raw(server: RunningServer, path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    """The bytes of a response, its head included."""
    address, sent = urlsplit(server.url), compact_json(body)
    head = (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: same\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def chunks(response: bytes) -> Iterator[bytes]:
    head, _, rest = response.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    while (size := int(rest.partition(b"\r\n")[0], 16)) > 0:
        _, _, rest = rest.partition(b"\r\n")
        yield rest[:size]
        assert rest[size : size + 2] == b"\r\n"
        rest = rest[size + 2 :]
    assert rest == b"0\r\n\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PROMPT},
        {"prompt": [PROMPT, "x"], "n": 2, "logprobs": 2, "echo": True},
        {"prompt": PROMPT, "stream_options": {"include_usage": True}},
        {"prompt": PROMPT, "stream_options": {"continuous_usage_stats": True}},
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
        {"messages": MESSAGES, "n": 3, "stream_options": {"include_usage": True}},
    ],
)
def test_each_event_is_a_chunk_and_compact_json(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    *events, last = chunks(raw(server, path, SAID | fields))
    assert last == b"data: [DONE]\n\n"
    for event in events:
        assert event == b"data: " + compact_json(json.loads(event[6:])) + b"\n\n"
    documents = [json.loads(event[6:]) for event in events]
    assert all([*each][:5] == ["id", "object", "created", "model", "choices"] for each in documents)
    options = fields.get("stream_options", {})
    usages = [each["usage"] for each in documents if "usage" in each]
    assert len(usages) == (len(documents) if options else 0)
    if "include_usage" in options:
        assert usages[:-1] == [None] * (len(usages) - 1) and usages[-1]["completion_tokens"]
    elif options:
        assert [each["completion_tokens"] for each in usages] == [*range(1, len(usages) + 1)]


def test_a_client_of_http_1_0_gets_the_same_events_without_chunks(server: RunningServer) -> None:
    body = SAID | {"prompt": PROMPT}
    expected = b"".join(chunks(raw(server, "/v1/completions", body)))
    _, _, plain = raw(server, "/v1/completions", body, "1.0").partition(b"\r\n\r\n")

    def texts(stream: bytes) -> list[Any]:
        return [json.loads(line[6:])["choices"] for line in stream.split(b"\n\n")[:-2]]

    assert texts(plain) == texts(expected)
    assert plain.endswith(b"data: [DONE]\n\n")


def test_the_measuring_client_counts_a_time_for_every_token(server: RunningServer) -> None:
    before = processor_seconds(os.getsid(0))
    streams = Client(urlsplit(server.url).port or 0).read(5, 20)
    assert [len(stream.times) for stream in streams] == [20] * 5
    assert all(stream.began < stream.times[0] <= stream.times[-1] for stream in streams)
    assert processor_seconds(os.getsid(0)) >= before
