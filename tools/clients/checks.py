"""What the checks of the Python clients share: `python SCRIPT.py URL MODEL`, a JSON line for each check.

The server has the script of `run.py`: it calls the tool after `ASK`, and answers `ANSWER` after its result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = "Who is Lily?"
ASK = "Use the weather tool."
CITY = "Köln"
RESULT = f"dry in {CITY}"
ANSWER = f"It is dry in {CITY}."
DESCRIPTION = "How it is outside"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Köln", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": DESCRIPTION, "parameters": PARAMETERS},
}


def tell(check: str, **seen: Any) -> None:
    """Print that a check has passed, and what was seen."""
    print(json.dumps({"check": check, **seen}, ensure_ascii=False), flush=True)


def extra_fields(value: Any, place: str = "") -> Iterator[str]:
    """Places of the fields that a client's model of a response does not know."""
    if isinstance(value, list):
        for item in value:
            yield from extra_fields(item, place)
    elif isinstance(value, BaseModel):
        yield from (f"{place}{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from extra_fields(getattr(value, name), f"{place}{name}.")
