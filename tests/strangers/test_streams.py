"""Recorded responses of other servers (streams/README.md), read as the client of `bench` reads them.

LLMOPT_STREAMS names another folder of recordings, such as one of newer versions.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.load.exchange import Response
from llmopt.bench.load.stream import chunk_tokens
from llmopt.bench.load.worker import _read

FOLDER = Path(os.environ.get("LLMOPT_STREAMS") or Path(__file__).parent / "streams")
ENDPOINT: Any = type("Endpoint", (), {"is_pooled": False})
STORY = ", there was a little girl named Lily. She"
HAS_TEXT = re.compile(r'"(content|text)": ?"[^"]')
# By file: (error, text, output tokens).
EXPECTED: dict[str, tuple[str, str, int]] = {
    "litellm-chat": ("", STORY, 12),
    "litellm-chat-document": ("", STORY, 12),
    "litellm-completion": ("", STORY, 12),
    "litellm-upstream-500": ("HTTP 500: litellm.InternalServerError: ", "", 0),
    "litellm-upstream-breaks": ("the server says: litellm.APIConnectionError: ", "Once", 1),
    "llama.cpp-chat": ("", STORY, 12),
    "llama.cpp-chat-document": ("", STORY, 12),
    "llama.cpp-chat-two-choices": ("", ", there was a little girl" * 2, 16),
    "llama.cpp-completion": ("", STORY, 12),
    "llama.cpp-long-prompt": (
        "HTTP 400: request (402 tokens) exceeds the available context",
        "",
        0,
    ),
    "transformers-chat": ("", STORY, 12),
}


def responded(recording: dict[str, Any]) -> Response:
    """The response as it came, each read of the body at its time."""
    headers = {name.lower(): value for name, value in recording["headers"].items()}
    lines = [f"HTTP/1.1 {recording['status']} -", *(f"{n}: {v}" for n, v in headers.items())]
    response = Response()
    response.feed(0.0, "\r\n".join([*lines, "", ""]).encode())
    is_chunked = headers.get("transfer-encoding") == "chunked"
    for seconds, text in recording["reads"]:
        data = text.encode(errors="surrogateescape")
        response.feed(seconds, b"%x\r\n%s\r\n" % (len(data), data) if is_chunked else data)
    if is_chunked:
        response.feed(recording["reads"][-1][0], b"0\r\n\r\n")
    assert response.is_whole
    return response


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_response(name: str) -> None:
    path = FOLDER / f"{name}.json"
    if "LLMOPT_STREAMS" in os.environ and not path.exists():
        pytest.skip(f"{path} was not recorded")
    recording = json.loads(path.read_text())
    answer = _read(responded(recording), ENDPOINT)
    error, text, tokens = EXPECTED[name]
    assert answer.error.startswith(error) and bool(answer.error) == bool(error)
    # Two choices interleave.
    assert sorted(answer.text) == sorted(text) if "two" in name else answer.text == text
    assert sum(chunk_tokens(answer, None)[0]) == tokens
    with_text = [t for t, read in recording["reads"] if HAS_TEXT.search(read)] if tokens else []
    assert answer.times[:1] == with_text[:1] and answer.times[-1:] == with_text[-1:]
    assert answer.unread == {}


def test_every_recording_has_its_right_answer() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} <= set(EXPECTED)
