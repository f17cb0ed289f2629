"""Structural tags in completions, chats and responses, with the limits of schemas."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ...support.live_server import RunningServer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
NEWER = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
}  # fmt: skip
SHAPE = r"<f>\{\s?\"n\"\s?:\s?-?\d+\s?\}</f>"
USER = [{"role": "user", "content": "Who is Lily?"}]
GREEDY = {"temperature": 0, "max_tokens": 60}


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with server.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_a_tag_shapes_completions_chats_and_responses(server: RunningServer) -> None:
    body = {"prompt": "Lily", **GREEDY, "response_format": NEWER}
    assert re.fullmatch(SHAPE, post(server, "/v1/completions", body)["choices"][0]["text"])
    body = {"messages": USER, **GREEDY, "response_format": NEWER}
    choice = post(server, "/v1/chat/completions", body)["choices"][0]
    assert re.fullmatch(SHAPE, choice["message"]["content"]) and choice["finish_reason"] == "stop"
    for tag in (NEWER, json.dumps(NEWER)):
        structured = {"structured_outputs": {"structural_tag": tag}}
        body = {"input": "Who?", "temperature": 0, "max_output_tokens": 60, **structured}
        (item,) = post(server, "/v1/responses", body)["output"]
        assert re.fullmatch(SHAPE, item["content"][0]["text"])


def test_text_outside_of_tags_stays_free(server: RunningServer) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
    free = post(server, "/v1/completions", body)["choices"][0]["text"]
    tagged = post(server, "/v1/completions", {**body, "response_format": OLDER})
    assert tagged["choices"][0]["text"] == free


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ({"type": "structural_tag"}, "a structural tag has a format, or structures and triggers"),
        ({**OLDER, "triggers": None}, "a structural tag has a format, or structures and triggers"),
        ({**OLDER, **NEWER}, "a structural tag has a format, or structures and triggers"),
        (
            {**OLDER, "triggers": ["<g"]},
            "response_format: structures.0.begin: '<f>' begins with none",
        ),
        ({"type": "text", "triggers": ["a"]}, "are for type 'structural_tag'"),
        (
            {"type": "structural_tag", "format": {"type": "qwen_xml_parameter"}},
            "qwen_xml_parameter",
        ),
        ({"type": "structural_tag", "format": {"type": "const_string", "valu": "a"}}, "value"),
        (
            {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}},
            "response_format: ",
        ),
        (
            {"type": "structural_tag", "format": {"type": "const_string", "value": "x" * 262_144}},
            "response_format: more than 262144 characters",
        ),
    ],
)
def test_a_tag_that_is_none_is_refused_with_its_place(
    server: RunningServer, tag: dict[str, Any], place: str
) -> None:
    body = {"messages": USER, "response_format": tag}
    error = post(server, "/v1/chat/completions", body, 400)["error"]
    assert place in error["message"] and "\n" not in error["message"]


def test_a_deeply_nested_tag_is_refused(server: RunningServer) -> None:
    form: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(200):
        form = {"type": "or", "elements": [form]}
    body = {"prompt": "a", "response_format": {"type": "structural_tag", "format": form}}
    assert "\n" not in post(server, "/v1/completions", body, 400)["error"]["message"]
    (tag, other) = ({"structural_tag": "{"}, {"structural_tag": "{}"})
    for wrong in (tag, other):
        body = {"prompt": "a", "structured_outputs": wrong}
        message = post(server, "/v1/completions", body, 400)["error"]["message"]
        assert message.startswith("structured_outputs.structural_tag")
