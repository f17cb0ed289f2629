"""Bodies of requests: JSON that is refused before validation, and validation that stops early."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llmopt.engine.server.protocol.body import MAX_ITEMS, parsed, read_json
from llmopt.engine.server.protocol.chat_protocol import ChatRequest
from llmopt.engine.server.protocol.errors import ApiError
from llmopt.engine.server.protocol.generation_protocol import CompletionRequest
from llmopt.engine.server.protocol.structure import parse_structural_tag

from ...support.live_server import RunningServer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ODD = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    '"\\ud800"',
    '{"\\udfff": 1}',
    "[" * 900 + "]" * 900,
]


@pytest.mark.parametrize("odd", ODD)
def test_json_that_no_response_could_contain(odd: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_json(f'{{"a": [{{"b": {odd}}}]}}'.encode())
    assert refused.value.status == 400


def test_json_with_a_byte_order_mark() -> None:
    assert read_json(b'\xef\xbb\xbf{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": [1] * MAX_ITEMS},
        {"tools": [1] * MAX_ITEMS},
        {"messages": [{}] * MAX_ITEMS},
        {"response_format": {"type": "structural_tag", "format": {"type": "or", "elements": [1] * 999}}},
    ],
)  # fmt: skip
def test_validation_stops_at_the_first_wrong_value(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(error: Any) -> ApiError:
        counts.append(error.error_count())
        return ApiError(400, "wrong")

    monkeypatch.setattr("llmopt.engine.server.protocol.body.as_api_error", counted)
    with pytest.raises(ApiError):
        parsed(ChatRequest, json.dumps({**CHAT, **fields}).encode())
    assert counts and counts[0] <= 10


def test_a_structural_tag_as_text_is_validated_as_a_body() -> None:
    tag = {"format": {"type": "sequence", "elements": [1] * 1000}}
    for given in (tag, json.dumps(tag)):
        with pytest.raises(ApiError, match=r"tag: format\.sequence\.elements\.0") as refused:
            parse_structural_tag(given, "tag")
        assert refused.value.status == 400 and refused.value.param == "tag"


@pytest.mark.parametrize(
    "value", [["a"] * (MAX_ITEMS + 1), dict.fromkeys(map(str, range(MAX_ITEMS + 1)))]
)
def test_the_size_of_lists_and_objects(value: Any) -> None:
    with pytest.raises(ApiError, match=f"metadata: .*at most {MAX_ITEMS}") as refused:
        read_json(json.dumps({"metadata": [{"inner": value}]}).encode())
    assert refused.value.param == "metadata"


def test_long_lists_of_token_ids_are_taken() -> None:
    body = parsed(CompletionRequest, json.dumps({"prompt": [1] * 200_000}).encode())
    assert isinstance(body, CompletionRequest) and len(body.prompt) == 200_000


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", '{"input": "a", "max_output_tokens": 1, "metadata": {"a": X}}'),
        ("/v1/responses", '{"input": "a", "max_output_tokens": 1, "stream": true, "tools": [{"type": "function", "name": "f", "parameters": {"a": X}}]}'),
        ("/v1/responses", '{"input": "a", "max_output_tokens": 1, "tools": [{"type": "custom", "name": "f", "format": {"a": X}}]}'),
        ("/abort", '{"id": "a", "b": X}'),
        ("/tokenize", '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": X}}}]}'),
    ],
)  # fmt: skip
def test_odd_json_is_refused_by_endpoints(
    server: RunningServer, path: str, body: str, odd: str
) -> None:
    with server.http(headers={"Content-Type": "application/json"}) as http:
        answer = http.post(path, content=body.replace("X", odd))
    assert answer.status_code == 400, answer.text
