"""A prompt beyond the context, in the words of each protocol that its clients know."""

from __future__ import annotations

from typing import Any

import pytest

from ...support.live_server import RunningServer

LONG = "one two three " * 400
MESSAGES = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize("text", [LONG, LONG * 2000], ids=["tokens", "characters"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"max_tokens": 4}),
        ("/v1/chat/completions", {"max_tokens": 4}),
        ("/v1/responses", {"max_output_tokens": 16}),
        ("/v1/messages", {"max_tokens": 4}),
    ],
)
def test_a_long_prompt_is_refused_in_each_protocol(
    server: RunningServer, path: str, body: dict[str, Any], text: str
) -> None:
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    value = [{"role": "user", "content": text}] if field == "messages" else text
    with server.http() as http:
        answer = http.post(path, json={"model": "tiny", field: value, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path == "/v1/messages":
        words = error["message"].split()
        assert words[:4] == ["prompt", "is", "too", "long:"] and words[5:] == [
            "tokens", ">", "512", "maximum",
        ]  # fmt: skip
        assert int(words[4]) > 512 and error["type"] == "invalid_request_error"
    else:
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 512 tokens")


def test_a_completion_beyond_the_context_is_told_apart(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5000}
    with server.http() as http:
        message = http.post("/v1/messages", json=body).json()["error"]["message"]
        assert message.startswith("input length and `max_tokens` exceed context limit: ")
        assert " + 5000 > 512, decrease input length or `max_tokens`" in message
        answer = http.post("/v1/chat/completions", json=body).json()["error"]
        assert answer["code"] == "context_length_exceeded" and "5000 new ones" in answer["message"]


def test_values_that_openai_and_vllm_take(server: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 1}
    with server.http() as http:
        likeliest = http.post("/v1/chat/completions", json={**chat, "temperature": 0}).json()
        for fields in ({"top_p": 0}, {"top_p": 0, "tools": []}):
            answer = http.post("/v1/chat/completions", json={**chat, **fields})
            assert answer.json()["choices"][0]["message"] == likeliest["choices"][0]["message"]
        body = {"prompt": "hi", "max_tokens": 1, "logprobs": False, "suffix": ""}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"] is None
        refused = http.post("/v1/completions", json={**body, "suffix": "x"})
        assert refused.status_code == 400 and "no tokens for filling in" in refused.text


def test_a_body_that_is_not_json_is_told_apart(server: RunningServer) -> None:
    sent = b'{"prompt": "hi", "max_tokens": 1}'
    with server.http() as http:
        for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
            headers = {"Content-Type": kind} if kind else {}
            refused = http.post("/v1/completions", content=sent, headers=headers)
            assert refused.status_code == 400
            assert "Content-Type: application/json" in refused.json()["error"]["message"]
            assert http.post("/api/show", content=b'{"model": "tiny"}').status_code == 200
