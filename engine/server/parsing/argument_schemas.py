"""Types of an argument that a model writes raw, without quotes: the schema tells strings from others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from .formats import json_value

Schema = Mapping[str, Any]

_JOINED = ("$ref", "allOf", "anyOf", "oneOf")
_KEPT = ("type", "enum", "const", "pattern", "minLength", "maxLength")
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
_PYTHON = {"True": True, "False": False, "None": None}
MAX_VARIANTS = 64
"""Limit of the schemas of an argument that are looked at. With more it may be any value, as where a `$ref`
leads back to itself."""
ANY: tuple[Schema, ...] = ({},)


def variants(declared: Any, root: Any) -> Sequence[Schema]:
    """The schemas of which an argument satisfies one, without `$ref`, `anyOf`, `oneOf` and `allOf`; an empty
    one allows any value. They keep only the keywords that tell a string from other values, or limit it."""
    waiting: list[Any] = [declared]
    simple: list[Schema] = []
    for _ in range(MAX_VARIANTS):
        if not waiting:
            return simple
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            return ANY
        kept = {key: schema[key] for key in _KEPT if key in schema}
        joined = next((key for key in _JOINED if key in schema), None)
        most = MAX_VARIANTS - len(waiting) - len(simple)
        if joined is None:
            simple.append(kept)
        elif joined == "$ref":
            waiting.append(_merged(kept, _target(schema["$ref"], root)))
        elif not isinstance(parts := schema[joined], list) or not 0 < len(parts) <= most:
            return ANY
        elif joined == "allOf":
            others = {key: schema[key] for key in _JOINED[2:] if key in schema}
            waiting.append(reduce(_merged, parts, {**kept, **others}))
        else:
            waiting += [_merged(kept, part) for part in reversed(parts)]
    return ANY


def _merged(kept: Any, part: Any) -> Any:
    """One schema for two of the same value; None where one of them is no schema."""
    if part is True:
        return kept
    return {**kept, **part} if isinstance(kept, Mapping) and isinstance(part, Mapping) else None


def _target(pointer: Any, root: Any) -> Any:
    """The schema that a `$ref` names; None where it is not in `root`."""
    names = str(pointer).split("/")
    if names[0] != "#":
        return None
    for name in names[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def values_of(schema: Schema) -> list[Any] | None:
    """The values that the schema lists; None where it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def types_of(schemas: Sequence[Schema]) -> frozenset[str]:
    """JSON types of the values that one of the `variants` allows."""
    return frozenset().union(*map(_types, schemas))


def _types(schema: Schema) -> frozenset[str]:
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = frozenset(name for name in names if isinstance(name, str)) or _TYPES
    if (values := values_of(schema)) is None:
        return types
    return frozenset(type_of(value) for value in values if _fits(value, types))


def type_of(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), "object")


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def raw_value(text: str, schemas: Sequence[Schema]) -> str:
    """An argument as JSON: the value of a JSON text, or one of Python's constants, where a schema allows that
    type and lists no such string; else a string."""
    types, stripped = types_of(schemas), text.strip()
    listed = [value for schema in schemas for value in values_of(schema) or ()]
    try:
        value, written = json_value(stripped), stripped
    except ValueError:
        value = _PYTHON.get(stripped, text)
        written = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):  # quotes around a raw string are its own
        is_value = {} in schemas or value in listed
    else:
        is_value = _fits(value, types) and stripped not in listed
    if is_value or "string" not in types:
        return written
    return json.dumps(text, ensure_ascii=False)
