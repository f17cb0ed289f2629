"""Arguments of a call as JSON, from elements whose values are plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

_PYTHON = {"True": True, "False": False, "None": None}
Kind = Literal["string", "other", "unknown"]


def kind_of(schema: Any, key: str) -> Kind:
    """Whether the schema of a tool's parameters makes this argument a string."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(declared, Mapping) or "type" not in declared:
        return "unknown"
    return "string" if declared["type"] == "string" else "other"


def escaped(text: str) -> str:
    """A piece of a text within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_of(text: str) -> str:
    """A value as JSON: itself if it is JSON, Python's constants, else a string."""
    stripped = text.strip()
    try:
        json.loads(stripped)
    except (ValueError, RecursionError):
        return json.dumps(_PYTHON.get(stripped, text), ensure_ascii=False)
    return stripped
