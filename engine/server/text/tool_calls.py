"""Calls of tools in the text of a model, as they come: the formats that models write them in."""

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
_BETWEEN = " \t\r\n,;]"
"""May stand behind a call, and `[` before one."""
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls: JSON objects with a name and arguments.

    Attributes:
        name: for `--tool-call-parser`.
        start: what stands before the first call; may be empty where calls are bare.
        end: what stands behind the last, if text may follow it.
        bare: a text that begins with one of these is a call even without `start`.
        named: a call may also be a name and an object of arguments beside each other.
        special: `start` is a special token, which is shown only where those are.
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
FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL)}
FORCED = ToolFormat("forced", "", bare="[")
"""What the schema of a request that must call a tool makes of the text, whatever the model."""


def format_of_template(template: str) -> ToolFormat | None:
    """The format that a chat template writes earlier calls in; None where it is none of ours."""
    if HERMES.start in template and "<function=" not in template:
        return HERMES
    if MISTRAL.start in template:
        return MISTRAL
    if LLAMA3_JSON.start in template or ('"parameters"' in template and "ipython" in template):
        return LLAMA3_JSON
    return None


def tool_format(name: str) -> ToolFormat:
    """Raises `BadInput` for a name that is none."""
    if name not in FORMATS:
        raise BadInput(f"--tool-call-parser {name}: need one of {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolReader:
    """Takes a completion's text in pieces, and tells text for people from calls.

    A call comes out whole, as soon as its last character is there. What looks like the beginning of a
    call is held back until that is decided, and shown as text if it was none.
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
        self._shown_since = False
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        """Add a piece; returns what may be shown now, and the calls that it completed."""
        if is_last:
            # Where special tokens are shown, so is the one that ended the text.
            text = next((text.removesuffix(e) for e in self._stop_texts if text.endswith(e)), text)
        self._held += text
        shown = ""
        calls: list[Call] = []
        while True:
            before = self._in_calls, len(self._held)
            text, found = self._take_call() if self._in_calls else (self._take_text(), [])
            shown, calls = shown + text, calls + found
            if before == (self._in_calls, len(self._held)):
                break
        if is_last:
            rest = self._opened + self._held
            shown += rest.strip(_BETWEEN + "[") if self._in_calls and self.num_calls else rest
            self._held = ""
        return shown, calls

    def _take_text(self) -> str:
        if not self._started:
            front = self._held.lstrip()
            if not front:
                return ""
            self._started = True
            if front[0] in self._format.bare:
                self._in_calls = True
                return ""
        if self.num_calls and not self._shown_since:
            self._held = self._held.lstrip()
            self._shown_since = bool(self._held)
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
        front = self._held.lstrip(_BETWEEN)
        start, end = self._format.start, self._format.end
        if end is not None and front.startswith(end):
            self._held, self._in_calls = front.removeprefix(end), False
            return "", []
        if start and front.startswith(start):
            self._held = front.removeprefix(start)
            return "", []
        front = front.lstrip(_BETWEEN + "[")
        named = _NAMED.match(front) if self._format.named else None
        try:
            found, length = _DECODER.raw_decode(front, named.end() if named else 0)
        except (ValueError, RecursionError):
            return "", []
        name, arguments = (named[1], found) if named else _parts(found)
        if name is None:
            if self.num_calls:
                return "", []
            # An object, but no call: the model means it as text.
            text, self._held = self._opened + self._held, ""
            self._in_calls, self._opened = False, ""
            return text, []
        self._held, self._opened = front[length:], ""
        if self.num_calls == self._max_calls:
            return "", []
        self.num_calls += 1
        self._shown_since = False
        return "", [Call(name, arguments_text(arguments), new_id())]


def _parts(found: Any) -> tuple[str | None, Any]:
    """Name and arguments of a call, under the names that models give them."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None, None
    return found["name"], found.get("arguments", found.get("parameters", {}))


def arguments_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def new_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return uuid.uuid4().hex[:9]
