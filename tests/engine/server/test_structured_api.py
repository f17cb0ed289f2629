"""`response_format`, `structured_outputs` and `guided_*`: outputs, and refused requests."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ...support.live_server import RunningServer, events

USER = [{"role": "user", "content": "Who is Lily?"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    with server.http() as http:
        response = http.post(
            "/v1/chat/completions",
            json={"messages": USER, "temperature": 0, "max_tokens": 150, **fields},
        )
    assert response.status_code == 200, response.text
    return response.json()


def test_a_schema_shapes_every_choice(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
        "n": 3,
        "seed": 5,
        "temperature": 1.0,
    }
    whole = chat(server, **body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) > 1
    for text in texts:
        person = json.loads(text)
        assert list(person) == ["name", "age", "pets"] and 0 <= person["age"] <= 120
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
    streamed = ["", "", ""]
    request = {"messages": USER, "max_tokens": 150, **body}
    for event in events(server, "/v1/chat/completions", request):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["delta"]["content"]
    assert streamed == texts


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "regex", "regex": "[A-Z]{3}-[0-9]{2}"}}, r"[A-Z]{3}-\d\d"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a" [0-9] "b"'}}, r"a\db"),
        ({"structured_outputs": {"choice": ["red", "grün"]}}, "red|grün"),
        ({"structured_outputs": {"regex": "x{4,5}"}}, "x{4,5}"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes|no"),
        ({"structured_outputs": {"json": json.dumps({"const": [1]})}}, r"\[\s*1\s*\]"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_regex": "(ab){2}c"}, "(ab){2}c"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_grammar": 'start: "q"'}, "q"),
    ],
)
def test_every_kind_of_structure(server: RunningServer, fields: Any, pattern: str) -> None:
    choice = chat(server, **fields)["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    body = {"prompt": "Lily said", "temperature": 0, "max_tokens": 60, **fields}
    with server.http() as http:
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert re.fullmatch(pattern, text)


def test_any_object_where_no_schema_is_given(server: RunningServer) -> None:
    for given in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "anything"}},
    ):
        choice = chat(server, response_format=given, max_tokens=60)["choices"][0]
        assert choice["message"]["content"].startswith("{")
    found = chat(server, structured_outputs={"json_object": True}, max_tokens=60)
    assert found["choices"][0]["message"]["content"].startswith("{")


def schema_format(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in each other."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (
            schema_format({"properties": {"a": {"items": {"type": "strin"}}}}),
            "response_format.json_schema.schema/properties/a/items: Invalid type: strin",
        ),
        (schema_format({"$ref": "#/nowhere"}), "response_format.json_schema.schema: "),
        (schema_format([]), "response_format.json_schema.schema"),
        (schema_format(nested(90)), "response_format.json_schema.schema: recursion limit"),
        (
            schema_format({"$defs": {"d": {"not": {}}}, "$ref": "#/$defs/d"}),
            "response_format.json_schema.schema/$defs/d: Unimplemented keys",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "text", "regex": "a"}}, "regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: "),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs.grammar: "),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar: "),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: the schema is not valid"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_json": '{"multipleOf": Infinity}'}, "guided_json: the schema is not JSON"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice: ask for one structure"),
    ],
)
def test_a_structure_that_is_none_is_refused_with_its_place(
    server: RunningServer, fields: dict[str, Any], place: str
) -> None:
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert place in error["message"] and "\n" not in error["message"]
    assert error["param"].split(".")[0] in fields


def test_responses_take_structured_outputs_too(server: RunningServer) -> None:
    """Field `json` of `structured_outputs` was lost on the way to the chat: it has another name in Python."""
    schema = {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    body = {"input": "hi", "max_output_tokens": 40, "structured_outputs": {"json": schema}}
    with server.http() as http:
        response = http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    (message,) = response.json()["output"]
    assert json.loads(message["content"][0]["text"]) == {"a": 5}
