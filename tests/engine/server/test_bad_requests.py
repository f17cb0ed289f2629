"""Requests that the server refuses: status and error body."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ...support.live_server import RunningServer

USER = [{"role": "user", "content": "hi"}]


def refusal(server: RunningServer, path: str, **request: Any) -> tuple[int, dict[str, Any]]:
    with server.http() as http:
        response = http.post(path, **request)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return response.status_code, error


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [10**9]}, "token id 1000000000"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": ["fine", "x " * 2000]}, "context length"),
        ({"prompt": "\ud800"}, "Unicode"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "context length"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 2**40}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "token id 999999"),
        ({"stop": [1]}, "stop"),
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"priority": 5}, "priority = 5: the scheduling policy is fcfs"),
        ({"priority": 2**40}, "priority"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"suffix": "the end"}, "suffix"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"request_id": "a b"}, "request_id"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_completion_is_refused_before_it_begins(
    server: RunningServer, fields: dict[str, Any], named: str, stream: bool
) -> None:
    body = {"prompt": "hi", "stream": stream, **fields}
    status, error = refusal(
        server,
        "/v1/completions",
        # The client's own JSON writer refuses half a surrogate pair; the standard one does not.
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "function", "content": "4"}]}, "role"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    ],
)
def test_a_bad_chat_is_refused(server: RunningServer, fields: dict[str, Any], named: str) -> None:
    status, error = refusal(server, "/v1/chat/completions", json={"messages": USER, **fields})
    assert status == 400
    assert named in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "hi"',
        b'{"prompt": "\xff\xfe"}',
        b"[]",
        b"",
        b'{"prompt":"hi","temperature":NaN}',
    ],
)
def test_a_broken_body_is_refused(server: RunningServer, content: bytes) -> None:
    status, _ = refusal(
        server, "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert status == 400


def test_refusals_do_not_repeat_the_prompt(server: RunningServer) -> None:
    secret = "a secret nobody may see"
    for fields in ({"temperature": "hot"}, {"prompt": [secret, 1]}, {"n": 0}):
        _, error = refusal(server, "/v1/completions", json={"prompt": secret, **fields})
        assert secret not in error["message"]


def test_fields_that_change_nothing_are_let_through(server: RunningServer) -> None:
    extra: dict[str, Any] = {
        "user": "somebody",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "temperature": None,
        "stop": None,
        "frobnicate": 1,
    }
    with server.http() as http:
        body = {"messages": USER, "max_tokens": 2, **extra}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_unknown_names_are_404(server: RunningServer) -> None:
    status, error = refusal(server, "/v1/completions", json={"model": "gpt-9", "prompt": "hi"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    client = server.openai()
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert client.models.retrieve("tiny").id == "tiny"
    status, _ = refusal(server, "/v1/frobnicate", json={})
    assert status == 404
    with server.http() as http:
        response = http.get("/v1/completions")
    assert response.status_code == 405 and response.json()["error"]["message"]


def test_a_batch_is_accepted_whole_or_rejected(server: RunningServer) -> None:
    before = server.wait_until_idle().num_steps
    status, _ = refusal(server, "/v1/completions", json={"prompt": ["fine", "x " * 2000]})
    assert status == 400
    after = server.wait_until_idle()
    assert (after.num_steps, after.num_waiting, after.kv_blocks_used) == (before, 0, 0)


def test_the_key_opens_the_door(protected_server: RunningServer) -> None:
    with protected_server.http() as http:
        assert http.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            response = http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer sesame"}
        assert http.get("/v1/models", headers=right).status_code == 200
        assert http.get("/version", headers=right).json()["version"]
