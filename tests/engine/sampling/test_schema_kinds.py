"""JSON schemas of JSONSchemaBench's kinds: each is refused by name, or a second validator accepts every output.

Outputs are random walks under the masks, token by token, over a vocabulary of bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer
from llmopt.base.errors import BadInput
from llmopt.engine.sampling.grammar import json_schema
from llmopt.engine.sampling.schema_limits import enforceable
from llmopt.engine.sampling.structural_tag import structural_tag

WALKS, MAX_BYTES = 24, 250
INTEGER, NULL = {"type": "integer"}, {"type": "null"}


def closed(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    kind = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**kind, "required": list(required), **more}


def texts(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


ENFORCED: dict[str, Any] = {
    "object": closed({"a": INTEGER, "b": {"type": "boolean"}}, "a", "b"),
    "optional": closed({"a": INTEGER, "b": NULL}),
    "required unknown": {"type": "object", "required": ["z"], "additionalProperties": NULL},
    "enum": {"enum": ["red", 7, None, True, [1], {"a": 1}]},
    "enum and bounds": {"type": "integer", "enum": [1, 20], "minimum": 5},
    "const": {"const": {"x": [1, 2.5, "\u2028\U0001f600"]}},
    "anyOf": {"anyOf": [{"minimum": 5}, {"maximum": -5}], "type": "integer"},
    "anyOf required": closed({"a": INTEGER, "b": NULL}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "oneOf disjoint": {"oneOf": [closed({"t": {"const": "a"}}, "t"), closed({"t": {"const": "b"}}, "t")]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}, {"multipleOf": 2}]},
    "allOf objects": {"allOf": [closed({"a": INTEGER}), {"properties": {"b": NULL}}]},
    "array": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    "array of any": {"type": "array", "items": NULL, "uniqueItems": False, "maxItems": 2},
    "prefixItems": {"type": "array", "prefixItems": [INTEGER, NULL], "items": False, "minItems": 1},
    "prefixItems and items": {"type": "array", "prefixItems": [INTEGER], "items": NULL, "maxItems": 3},
    **{name: texts(format=name) for name in ("date", "date-time", "ipv4", "ipv6", "uuid", "duration")},
    "pattern": texts(pattern="^[A-Z][a-z]{2,6}$"),
    "pattern within": texts(pattern="[0-9]{3}", maxLength=9),
    "pattern without quotes": texts(pattern='^[^"]{1,4}$'),
    "pattern without backslashes": texts(pattern="^a[^\\\\b]{1,4}$"),
    "pattern of controls": texts(pattern="^[\\x00-\\x1f]{1,2}$"),
    "pattern beyond ASCII": texts(pattern="^[^\\x20-\\x7e]{1,2}$"),
    "lengths": texts(minLength=2, maxLength=3),
    "bounds": {"type": "number", "minimum": -0.5, "maximum": 1.25},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "exclusive integers": {"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 3},
    "exclusive, draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1,
    },
    "multipleOf": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    "$ref": closed({"a": {"$ref": "#/$defs/p~1q"}}, "a", **{"$defs": {"p/q": INTEGER}}),
    "$ref and more": {"$ref": "#/$defs/p", "minimum": 5, "maximum": 9, "$defs": {"p": INTEGER}},
    "recursion": {"$ref": "#/$defs/n", "$defs": {"n": closed({"v": {"enum": [1, 2]}, "n": {"$ref": "#/$defs/n"}}, "v")}},
    "recursion in an array": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
    "additionalProperties": {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": NULL},
    "patternProperties": {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": NULL},
    "patternProperties beside": closed({"a": INTEGER}, "a", patternProperties={"^x$": NULL}),
    "patternProperties over": closed({"score": INTEGER}, "score", patternProperties={"^s": {"maximum": 5}}),
    "patternProperties without quotes": {"type": "object", "patternProperties": {'^[^"]{2}$': NULL}, "additionalProperties": False},
    "minProperties": {"type": "object", "additionalProperties": NULL, "minProperties": 1, "maxProperties": 2},
    "any propertyNames": {"type": "object", "additionalProperties": NULL, "propertyNames": {"type": "string"}},
    "type list": {"type": ["integer", "string"], "minimum": 5, "maxLength": 2},
    "booleans": closed({"a": True, "b": False}, "a"),
}  # fmt: skip

REFUSED: dict[str, tuple[str, Any]] = {
    "contains": ("contains", {"type": "array", "contains": {"const": 5}}),
    "uniqueItems": ("uniqueItems", {"type": "array", "uniqueItems": True}),
    "oneOf overlapping": ("oneOf", {"oneOf": [{"maximum": 10}, {"minimum": 5}]}),
    "not": ("not", {"not": {"type": "string"}}),
    "if": ("if", {"if": {"minimum": 5}, "then": {"maximum": 9}}),
    "propertyNames": ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    "dependentRequired": ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
    "dependentSchemas": ("dependentSchemas", {"dependentSchemas": {"a": {"required": ["b"]}}}),
    "unevaluatedProperties": ("unevaluatedProperties", {"unevaluatedProperties": False}),
    "format": ("format: regex", texts(format="regex")),
    "$dynamicRef": ("$dynamicRef", {"$dynamicRef": "#n"}),
    "$ref to itself": ("$ref", {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}),
    "$ref to the root": ("$ref", {"$ref": "#"}),
    "$ref to its name": ("$ref", {"$ref": "#n", "$anchor": "n"}),
    "$ref in a ring": (
        "/$defs/a",
        closed(
            {"x": {"$ref": "#/$defs/a"}},
            **{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        ),
    ),
    "patternProperties": (
        "patternProperties",
        closed({"score": INTEGER}, patternProperties={"^score$": INTEGER}),
    ),
    "exclusiveMinimum": ("exclusiveMinimum 0", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.1}),
    "exclusiveMaximum": ("exclusiveMaximum 0", {"type": "number", "exclusiveMinimum": -0.1, "exclusiveMaximum": 0}),
    "exclusive of draft 4": ("exclusiveMinimum", {"minimum": 0, "exclusiveMinimum": True}),
    "large integers": ("minimum", {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}),
    "a large const": ("const", {"const": {"id": [2**53 + 1]}}),
    "a large enum": ("enum", {"enum": [2**53 + 1]}),
    "minProperties": ("minProperties 2", {"type": "object", "additionalProperties": NULL, "minProperties": 2}),
    "another tool's options": ("x-guidance", {"x-guidance": {"lenient": True}, "not": NULL}),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def walk(vocabulary: LLTokenizer, grammar: str, source: random.Random) -> str | None:
    """An output of random bytes that the grammar allows; None where it did not end in time."""
    matcher, output = LLMatcher(vocabulary, grammar, log_level=0), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    end = vocabulary.eos_token
    for _ in range(MAX_BYTES):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if mask[end // 8] >> end % 8 & 1 and (not allowed or source.random() < 0.5):
            return output.decode()
        # What ends a part comes often, and so do escapes.
        likely = [byte for byte in allowed if byte in b'"]},:\\'] or allowed
        byte = source.choice(likely if source.random() < 0.35 else allowed)
        output.append(byte)
        assert matcher.consume_token(byte)
    return None


def compiled(schema: Any) -> str:
    return json_schema(enforceable(schema))


@pytest.mark.parametrize("kind", ENFORCED)
def test_every_output_satisfies_its_schema(vocabulary: LLTokenizer, kind: str) -> None:
    schema, grammar = ENFORCED[kind], compiled(ENFORCED[kind])
    validator = validator_for(schema, Draft202012Validator)
    checked = validator(schema, format_checker=validator.FORMAT_CHECKER)
    outputs = [walk(vocabulary, grammar, random.Random(seed)) for seed in range(WALKS)]
    finished = [output for output in outputs if output is not None]
    assert len(finished) > WALKS // 3
    for output in finished:
        checked.validate(json.loads(output))


def test_an_object_has_the_properties_that_its_schema_names() -> None:
    """Pydantic names no `additionalProperties`, and a model adds properties without end."""
    inner = {"type": "object", "properties": {"b": INTEGER}}
    schema = {"properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"], "$defs": {"b": inner}}
    closed = enforceable(schema)
    assert closed["additionalProperties"] is closed["$defs"]["b"]["additionalProperties"] is False
    for left_open in (
        {"type": "object"},
        inner | {"additionalProperties": True},
        inner | {"patternProperties": {"^x": INTEGER}},
        inner | {"required": ["z"]},
        {"allOf": [inner, {"properties": {"c": INTEGER}}]},
        inner | {"anyOf": [{"required": ["b"]}, {"properties": {"c": INTEGER}}]},
        inner | {"enum": [{"b": 1, "c": 2}]},
        {"required": ["b", "c"], "anyOf": [inner]},
        {"required": ["c"], "$ref": "#/$defs/b", "$defs": {"b": inner}},
        {"patternProperties": {"^x": INTEGER}, "allOf": [inner]},
    ):
        assert False not in [
            part.get("additionalProperties") for part in objects(enforceable(left_open))
        ]


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_enforced_is_refused_by_name(vocabulary: LLTokenizer, kind: str) -> None:
    name, schema = REFUSED[kind]
    try:
        message = LLMatcher.validate_grammar(compiled(schema), vocabulary)
    except BadInput as error:
        message = str(error)
    assert name in message


def test_a_structural_tag_refuses_the_same() -> None:
    schema = {"$ref": "#"}
    form: dict[str, Any] = {"type": "json_schema"}
    form["json_schema"] = closed({"a": INTEGER, "b": schema})
    structural_tag({"format": form}, " ?")  # an object in an object comes to an end
    form["json_schema"] = {"anyOf": [schema, NULL]}
    with pytest.raises(BadInput, match=r"^format.json_schema/.*\$ref leads back to itself"):
        structural_tag({"format": form}, " ?")


def test_a_large_schema_is_checked_at_once() -> None:
    """Cycles are searched once over, not once from each schema."""
    chain: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, NULL]} for n in range(3000)
    }
    enforceable({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": INTEGER}})
    chain["d2999"] = {"$ref": "#/$defs/d0"}
    with pytest.raises(BadInput, match="leads back to itself"):
        enforceable({"$ref": "#/$defs/d0", "$defs": chain})
