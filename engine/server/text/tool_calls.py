"""Streaming tool-call parsers: Hermes, Llama 3 JSON, Mistral, and forced JSON."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....quant.base.errors import BadInput
from ...scheduling.stop import overlap

_DECODER = json.JSONDecoder()
_SEPARATORS = " \t\r\n,;]"
"""Characters allowed after a call; before one, also `[`."""
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call format of a model family: JSON objects with a name and arguments.

    Attributes:
        name: value of `--tool-call-parser`.
        start: marker before the first call; empty if calls have none.
        end: marker after the last call, if text may follow.
        bare: characters that begin a call without `start`, at the beginning of the text.
        named: a call may also be a name followed by an object of arguments.
        special: `start` is a special token, decoded only with `skip_special_tokens=False`.
    """

    name: str
    start: str
    end: str | None = None
    bare: str = ""
    named: bool = False
    special: bool = False


HERMES = ToolFormat("hermes", "<tool_call>", end="</tool_call>")
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", bare="{", special=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", named=True, special=True)
FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON, MISTRAL)}
FORCED = ToolFormat("forced", "", bare="[")
"""Output of a forced tool call, constrained by the JSON schema, whatever the model."""


def format_of_template(template: str) -> ToolFormat | None:
    """Detect the tool-call format from a chat template; None if it is not a supported one."""
    if HERMES.start in template and "<function=" not in template:
        return HERMES
    if MISTRAL.start in template:
        return MISTRAL
    if LLAMA3_JSON.start in template or ('"parameters"' in template and "ipython" in template):
        return LLAMA3_JSON
    return None


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises `BadInput` for an unknown one."""
    if name not in FORMATS:
        raise BadInput(f"--tool-call-parser {name}: need one of {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed tool call; `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolReader:
    """Streaming parser that separates a completion's content from its tool calls.

    A call is returned whole, with its last character. Text that may begin a call is held back until that
    is decided, and returned as content if it is not a call.
    """

    def __init__(
        self, form: ToolFormat, *, max_calls: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        self._format = form
        self._max_calls = max_calls
        self._stop_texts = stop_texts
        self._held = ""
        self._in_calls = False
        self._opened = ""
        self._started = False
        self._emitted_since = False
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        """Feed a text delta; returns the content and the completed calls that can be emitted now."""
        if is_last:
            # With special tokens decoded, the text ends with that of the EOS token.
            text = next((text.removesuffix(e) for e in self._stop_texts if text.endswith(e)), text)
        self._held += text
        content = ""
        calls: list[Call] = []
        while True:
            before = self._in_calls, len(self._held)
            text, parsed = self._take_call() if self._in_calls else (self._take_text(), [])
            content, calls = content + text, calls + parsed
            if before == (self._in_calls, len(self._held)):
                break
        if is_last:
            rest = self._opened + self._held
            content += rest.strip(_SEPARATORS + "[") if self._in_calls and self.num_calls else rest
            self._held = ""
        return content, calls

    def _take_text(self) -> str:
        if not self._started:
            front = self._held.lstrip()
            if not front:
                return ""
            self._started = True
            if front[0] in self._format.bare:
                self._in_calls = True
                return ""
        if self.num_calls and not self._emitted_since:
            self._held = self._held.lstrip()
            self._emitted_since = bool(self._held)
        start = self._format.start
        if not start:
            shown, self._held = self._held, ""
            return shown
        at = self._held.find(start)
        if at >= 0:
            shown, self._held = self._held[:at], self._held[at + len(start) :]
            self._in_calls, self._opened = True, start
            return shown
        keep = overlap(self._held, start)
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown

    def _take_call(self) -> tuple[str, list[Call]]:
        front = self._held.lstrip(_SEPARATORS)
        start, end = self._format.start, self._format.end
        if end is not None and front.startswith(end):
            self._held, self._in_calls = front.removeprefix(end), False
            return "", []
        if start and front.startswith(start):
            self._held = front.removeprefix(start)
            return "", []
        front = front.lstrip(_SEPARATORS + "[")
        named = _NAMED.match(front) if self._format.named else None
        try:
            parsed, length = _DECODER.raw_decode(front, named.end() if named else 0)
        except (ValueError, RecursionError):
            return "", []
        name, arguments = (named[1], parsed) if named else _parts(parsed)
        if name is None:
            if self.num_calls:
                return "", []
            # An object, but not a call: content.
            text, self._held = self._opened + self._held, ""
            self._in_calls, self._opened = False, ""
            return text, []
        self._held, self._opened = front[length:], ""
        if self.num_calls == self._max_calls:
            return "", []
        self.num_calls += 1
        self._emitted_since = False
        return "", [Call(name, arguments_text(arguments), new_id())]


def _parts(value: Any) -> tuple[str | None, Any]:
    """Name and arguments of a call, under either key that models use; (None, None) for no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, None
    return value["name"], value.get("arguments", value.get("parameters", {}))


def arguments_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def new_id() -> str:
    """A tool-call id of nine letters and digits, as Mistral's templates require."""
    return uuid.uuid4().hex[:9]
