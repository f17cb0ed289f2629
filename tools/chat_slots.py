"""Functions as sentences with slots, for items of the task `tool_calls`. A slot is a parameter with known
values, so that the call which a filled sentence asks for is known too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUMBERS = (
    *("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)


@dataclass(frozen=True)
class Slot:
    """A parameter: its schema, and pairs of a text for the sentence and the values that it means."""

    schema: Mapping[str, Any]
    values: Sequence[tuple[str, Sequence[Any]]]

    @property
    def kind(self) -> str:
        return "enum" if "enum" in self.schema else self.schema["type"]


def text(description: str, *values: str) -> Slot:
    return Slot({"type": "string", "description": description}, [(v, [v]) for v in values])


def whole(description: str, low: int, high: int) -> Slot:
    values = [(str(n), [n]) for n in range(low, high + 1)]
    return Slot({"type": "integer", "description": description}, values)


def number(description: str, *values: float) -> Slot:
    return Slot({"type": "number", "description": description}, [(f"{v:g}", [v]) for v in values])


def choice(description: str, *values: str, **spoken: str) -> Slot:
    """One of several texts; `spoken` maps a value to its wording in a sentence."""
    schema = {"type": "string", "enum": list(values), "description": description}
    return Slot(schema, [(spoken.get(v, v.replace("_", " ")), [v]) for v in values])


def flag(description: str, yes: str, no: str) -> Slot:
    return Slot({"type": "boolean", "description": description}, [(yes, [True]), (no, [False])])


def several(description: str, *values: Sequence[str]) -> Slot:
    schema = {"type": "array", "items": {"type": "string"}, "description": description}
    return Slot(schema, [(" and ".join(v), [list(v)]) for v in values])


def nested(description: str, sentence: str, **slots: Slot) -> Slot:
    """An object whose fields are slots of a part of the sentence."""
    schema = {
        "type": "object",
        "description": description,
        "properties": {name: slot.schema for name, slot in slots.items()},
        "required": list(slots),
    }
    rng = random.Random(f"{description} {sentence}")
    values = []
    for _ in range(24):
        chosen = {name: rng.choice(slot.values) for name, slot in slots.items()}
        words = sentence.format(**{name: said for name, (said, _) in chosen.items()})
        values.append((words, [{name: list(value) for name, (_, value) in chosen.items()}]))
    return Slot(schema, values)


@dataclass(frozen=True)
class Tool:
    """A function with the sentence that asks for it; functions of one group are alike."""

    name: str
    group: str
    description: str
    sentence: str
    slots: Mapping[str, Slot]

    @property
    def function(self) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {name: slot.schema for name, slot in self.slots.items()},
            "required": list(self.slots),
        }
        return {"name": self.name, "description": self.description, "parameters": parameters}

    def asked(self, rng: random.Random, *, spelled: bool = False) -> tuple[str, dict[str, Any]]:
        """A sentence, and the call that it asks for; `spelled` writes whole numbers as words."""
        words, values = {}, {}
        for name, slot in self.slots.items():
            said, values[name] = rng.choice(slot.values)
            if spelled and slot.kind == "integer":
                value = rng.choice(
                    [v for _, (v,) in slot.values if 2 <= v <= 20] or [slot.values[0][1][0]]
                )
                said, values[name] = NUMBERS[value - 2] if 2 <= value <= 20 else str(value), [value]
            words[name] = said
        return self.sentence.format(**words), {self.name: values}


def tool(name: str, group: str, description: str, sentence: str, **slots: Slot) -> Tool:
    return Tool(name, group, description, sentence, slots)
