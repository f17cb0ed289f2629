"""Events of a parsed output: pieces of reasoning, text and tool calls, in the order in which they come."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of the tool call `index`, counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments; all of them together are a JSON object."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | Arguments


def call_id(seed: str, number: int) -> str:
    """Id of an output's tool call: nine letters and digits, as Mistral's templates require.

    By a hash of what it belongs to, so that the same output of the same prompt is the same response.
    """
    return hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:9]


@dataclass(slots=True)
class ParsedCall:
    """A whole tool call; `arguments` is a JSON object, as text."""

    id: str
    name: str
    arguments: str = ""

    @property
    def value(self) -> Any:
        """The arguments' value; an empty object where they were cut off."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return {}


class Parsed:
    """The whole of a parsed output, joined from its events."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[ParsedCall] = []

    def add(self, events: list[Event]) -> None:
        """Append events."""
        for event in events:
            match event:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(ParsedCall(call_id, name))
                case Arguments(index, text):
                    self.calls[index].arguments += text
