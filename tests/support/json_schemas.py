"""JSON schemas of growing nesting, from a seed."""

from __future__ import annotations

import json
import random
from typing import Any

DEPTHS = 10


def make_schema(depth: int, source: random.Random) -> dict[str, Any]:
    """A schema of `depth` levels whose texts are bounded, so that every one comes to an end."""
    if depth == 0:
        return _leaf(source)
    inner = make_schema(depth - 1, source)
    kind = source.choice(("object", "object", "object", "array", "anyOf", "$ref"))
    if kind == "array":
        return {"type": "array", "items": inner, "minItems": 1, "maxItems": 1 + (depth < 4)}
    if kind == "anyOf":
        return {"anyOf": [_object(source, inner), _leaf(source)]}
    if kind == "$ref" and "$defs" not in json.dumps(inner):
        return {"$defs": {"part": inner}, **_object(source, {"$ref": "#/$defs/part"})}
    return _object(source, inner)


def _object(source: random.Random, inner: dict[str, Any]) -> dict[str, Any]:
    names = source.sample("abcdefgh", 2)
    parts = [inner, _leaf(source)]
    source.shuffle(parts)
    return {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": names,
        "additionalProperties": False,
    }


def _leaf(source: random.Random) -> dict[str, Any]:
    low = source.randint(-50, 50)
    return source.choice(
        [
            {"type": "string", "maxLength": source.randint(1, 12)},
            {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
            {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 300)},
            {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
            {"type": "boolean"},
            {"type": ["boolean", "null"]},
            {"enum": ["red", 7, None, True]},
            {"const": {"x": [1, 2]}},
        ]
    )


def make_schemas(count: int, seed: int) -> list[tuple[int, dict[str, Any]]]:
    """(depth, schema): as many of each depth, from shallow to deep."""
    source = random.Random(seed)
    depths = [1 + index * DEPTHS // count for index in range(count)]
    return [(depth, _rooted(make_schema(depth, source))) for depth in depths]


def _rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """With its definitions at the top, where `$ref` looks for them."""
    found: dict[str, Any] = {}

    def without(part: Any) -> Any:
        if isinstance(part, list):
            return [without(one) for one in part]
        if not isinstance(part, dict):
            return part
        found.update(part.get("$defs", {}))
        return {key: without(value) for key, value in part.items() if key != "$defs"}

    bare = without(schema)
    return {**bare, "$defs": {name: without(one) for name, one in found.items()}} if found else bare
