"""Reader of tool calls in each style, from the place where one begins, in a text that arrives in pieces.

A parser is a generator: it yields where it needs more text, and is resumed when there is some or the text has
ended. Whatever is read is dropped, so that the work is linear in the text, however it is cut.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...scheduling.outputs import overlap
from .argument_schemas import ANY, raw_value, types_of, variants
from .formats import SEPARATORS, Arguments, CallStart, Event, Tags, ToolFormat, call_id, json_value

Waiting = Generator[None, None, None]
Emit = Callable[[str], object]

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_LITERAL = re.compile(r"[\s,}\]]")
SPACE = " \t\r\n"


class TextSource:
    """The unread text. While `record` is on, what is read is kept, to be given back as plain text."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._recorded: list[str] | None = None
        self.has_ended = False

    def feed(self, text: str, *, is_last: bool) -> None:
        self._text, self._at = self._text[self._at :] + text, 0
        self.has_ended = is_last

    def record(self) -> None:
        self._recorded = []

    def recorded(self) -> str:
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def take(self, count: int) -> str:
        """Read `count` characters that are known to be there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def unread(self, text: str) -> None:
        """Give back what was read last."""
        self._text, self._at = text + self._text[self._at :], 0

    def peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and not self.has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def skip(self, characters: str) -> Generator[None, None, str]:
        """Skip any of these characters; the one after them, unread."""
        while True:
            following = yield from self.peek()
            if not following or following not in characters:
                return following
            self.take(1)

    def next_is(self, *markers: str) -> Generator[None, None, str | None]:
        """Which of these markers comes next, unread, the first of several; None if none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, markers))]
            if not self.has_ended and any(
                len(rest) < len(marker) and marker.startswith(rest) for marker in markers
            ):
                yield
                continue
            return next((marker for marker in markers if rest.startswith(marker)), None)

    def until(self, stops: Sequence[str], emit: Emit) -> Generator[None, None, str | None]:
        """Emit the text before the first of these markers; the marker, unread, or None at the end. None of
        them may begin with another one. Without any, all that is left is emitted."""
        while True:
            if (match := self._find(stops)) is not None:
                self._emit(match[0] - self._at, emit)
                return match[1]
            self._emit(self._num_decided(stops), emit)
            if self.has_ended:
                return None
            yield

    def collect(self, stops: Sequence[str], limit: int) -> Generator[None, None, str | None]:
        """The text before the first of these markers, which stays unread; None at the end, or where it is
        longer than `limit` characters."""
        parts: list[str] = []
        size = 0
        while True:
            match = self._find(stops)
            count = self._num_decided(stops) if match is None else match[0] - self._at
            if (size := size + count) > limit:
                return None
            parts.append(self.take(count))
            if match is not None:
                return "".join(parts)
            if self.has_ended:
                return None
            yield

    def json_value(self, emit: Emit) -> Generator[None, None, bool]:
        """Emit the JSON value that comes next, as it is written; False if the text ends within it."""
        first = yield from self.peek()
        if not first:
            return False
        if first not in '{["':
            return (yield from self._literal(emit))
        depth, in_string, offset = 0, False, 0
        while True:
            pattern = _IN_STRING if in_string else _STRUCTURE
            match = pattern.search(self._text, self._at + offset)
            if match is None or (match[0] == "\\" and match.end() == len(self._text)):
                end = len(self._text) if match is None or self.has_ended else match.start()
                self._emit(end - self._at, emit)
                if self.has_ended:
                    return False
                offset = 0
                yield
                continue
            offset = match.end() - self._at + (match[0] == "\\")
            if match[0] == '"':
                in_string = not in_string
            elif match[0] != "\\":
                depth += 1 if match[0] in "{[" else -1
            if depth <= 0 and not in_string:
                self._emit(offset, emit)
                return True

    def _literal(self, emit: Emit) -> Generator[None, None, bool]:
        while True:
            match = _AFTER_LITERAL.search(self._text, self._at)
            end = len(self._text) if match is None else match.start()
            self._emit(end - self._at, emit)
            if match is not None or self.has_ended:
                return True
            yield

    def _find(self, stops: Sequence[str]) -> tuple[int, str] | None:
        hits = ((self._text.find(stop, self._at), stop) for stop in stops)
        return min((match for match in hits if match[0] >= 0), default=None)

    def _num_decided(self, stops: Sequence[str]) -> int:
        """Characters of the unread text that cannot belong to a marker, where it has no whole one."""
        length = len(self._text) - self._at
        if self.has_ended or not length or not stops:
            return length
        tail = self._text[max(self._at, len(self._text) - max(map(len, stops))) :]
        return length - max(overlap(tail, stop) for stop in stops)

    def _emit(self, count: int, emit: Emit) -> None:
        if count > 0:
            emit(self.take(count))


_JSON = {"true": True, "false": False, "null": None}


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


MAX_HEADER = 512
"""Characters of a name and what surrounds it."""

Reading = Generator[None, None, bool]


@dataclass(slots=True)
class CallReader:
    """Reads calls and appends their events. `read` returns whether there was one; if not, what it has read is
    recorded by the source, and no event is appended."""

    _source: TextSource
    _events: list[Event]
    _schemas: Mapping[str, Any]
    _max_calls: int | None
    _seed: str
    num_calls: int = 0
    _is_dropped: bool = False
    _is_bare: bool = False

    def read(self, form: ToolFormat, *, is_bare: bool = False) -> Reading:
        """Read the call that begins here; a bare one, without a marker, is one only of a declared tool."""
        self._is_bare = is_bare
        if form.style == "tags":
            assert form.tags is not None
            return self._tags(form.tags, form.end)
        if form.style == "python":
            return self._python()
        return self._object(form)

    def _may_be(self, name: str) -> bool:
        return not self._is_bare or not self._schemas or name in self._schemas

    def begin(self, name: str, given_id: str | None = None) -> None:
        """Begin a call; its text is no longer given back."""
        self._source.recorded()
        self._is_dropped = self.num_calls == self._max_calls
        if not self._is_dropped:
            new_id = given_id or call_id(self._seed, self.num_calls)
            self._events.append(CallStart(self.num_calls, new_id, name))
            self.num_calls += 1

    def argue(self, text: str) -> None:
        if text and not self._is_dropped:
            self._events.append(Arguments(self.num_calls - 1, text))

    def _object(self, form: ToolFormat) -> Reading:
        """An object with name and arguments, or a header with the name and an object of arguments."""
        source = self._source
        first = yield from source.skip(SEPARATORS + "[")
        if form.style == "json" or first == "{":
            return first == "{" and (yield from self._json())
        header = yield from source.collect(["{"], MAX_HEADER)
        match = None if header is None else form.header.fullmatch(header)
        if match is None:
            return False
        self.begin(match["name"], match.groupdict().get("id"))
        yield from source.json_value(self.argue)
        return True

    def _json(self) -> Reading:
        """An object with `name`, and `arguments` or `parameters`, in any order and among other keys."""
        source = self._source
        source.take(1)
        name: str | None = None
        early: str | None = None
        has_arguments = False
        while (yield from source.skip(SPACE + ",")) == '"':
            key = yield from self._string()
            if (yield from source.skip(SPACE)) != ":":
                break
            source.take(1)
            first = yield from source.skip(SPACE)
            if key == "name" and name is None:
                name = yield from self._string()
                if name is None:
                    break
                if not self._may_be(name):
                    return False
                self.begin(name)
                if early is not None:
                    self.argue(early)
            elif key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                if name is not None and first != '"':
                    yield from source.json_value(self.argue)
                    continue
                early = yield from self._json_text()
                with suppress(ValueError):  # a string may hold the object
                    early = str(json_value(early)) if first == '"' else early
                if name is not None:
                    self.argue(early)
            else:
                yield from source.json_value(lambda _: None)
        if (yield from source.peek()) == "}":
            source.take(1)
        if name is not None and not has_arguments:
            self.argue("{}")
        return name is not None

    def _string(self) -> Generator[None, None, str | None]:
        """A JSON string; None for another value or a broken one."""
        text = yield from self._json_text()
        try:
            value = json_value(text)
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def _json_text(self) -> Generator[None, None, str]:
        parts: list[str] = []
        yield from self._source.json_value(parts.append)
        return "".join(parts)

    def _tags(self, tags: Tags, end: str | None) -> Reading:
        """Elements; the closing marker is left where it also ends all calls."""
        source = self._source
        if tags.name_open:
            if (yield from source.next_is(tags.name_open)) is None:
                return False
            source.take(len(tags.name_open))
        name = yield from source.collect(tags.name_ends, MAX_HEADER)
        if name is None or not name.strip() or "{" in name:
            return False
        name = name.strip()
        if tags.name_open:
            source.take(len(tags.name_ends[0]))
        self.begin(name)
        separator = "{"
        while True:
            marker = yield from source.until([tags.key_open, tags.call_close], lambda _: None)
            if marker != tags.key_open:
                break
            source.take(len(tags.key_open))
            key = yield from source.collect([tags.key_close], MAX_HEADER)
            if key is None:
                break
            source.take(len(tags.key_close))
            schemas = self._variants(name, key)
            if tags.typed:
                key, _, is_string = key.partition('" string="')
                schemas = [{"type": "string"}] if is_string == "true" else ANY
            self.argue(separator + json.dumps(key.strip(), ensure_ascii=False) + ": ")
            separator = ", "
            yield from self._value(tags, schemas)
        if marker == tags.call_close and marker != end:
            source.take(len(tags.call_close))
        self.argue("{}" if separator == "{" else "}")
        return True

    def _variants(self, name: str, key: str) -> Sequence[Mapping[str, Any]]:
        root = self._schemas.get(name)
        properties = root.get("properties") if isinstance(root, Mapping) else None
        return variants(properties.get(key) if isinstance(properties, Mapping) else None, root)

    def _value(self, tags: Tags, schemas: Sequence[Mapping[str, Any]]) -> Waiting:
        """The value of an argument: a string as it comes, anything else once it is whole."""
        source = self._source
        if tags.value_open:
            yield from source.skip(SPACE)
            if (yield from source.next_is(tags.value_open)) is not None:
                source.take(len(tags.value_open))
        ends = [tags.value_close]
        if tags.strips_newlines:
            ends.append("\n" + tags.value_close)
            if (yield from source.peek()) == "\n":
                source.take(1)
        if types_of(schemas) == {"string"}:
            self.argue('"')
            end = yield from source.until(ends, lambda text: self.argue(escaped(text)))
            self.argue('"')
        else:
            parts: list[str] = []
            end = yield from source.until(ends, parts.append)
            self.argue(raw_value("".join(parts), schemas))
        source.take(len(end or ""))

    def _python(self) -> Reading:
        """A list of calls with keyword arguments of literals: `[f(a=1), g()]`."""
        parts: list[str] = []
        if (yield from self._source.peek()) != "[":
            return False
        yield from self._bracketed(parts)
        try:
            listed = ast.parse("".join(parts), mode="eval").body
            assert isinstance(listed, ast.List) and listed.elts
            calls = [_call(element) for element in listed.elts]
        except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
            return False
        if not all(self._may_be(name) for name, _ in calls):
            return False
        for name, arguments in calls:
            self.begin(name)
            text = json.dumps(arguments, ensure_ascii=False)
            # JSON's escapes may have halves of characters, which Python does not join.
            self.argue(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return True

    def _bracketed(self, parts: list[str]) -> Waiting:
        """Read up to the bracket that closes the first one, or the end; strings are Python's."""
        depth, quote = 0, ""
        while character := (yield from self._source.peek()):
            parts.append(self._source.take(1))
            if character == "\\" and quote:
                yield from self._source.peek()
                parts.append(self._source.take(1))
            elif quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in "[({":
                depth += 1
            elif character in "])}":
                depth -= 1
                if not depth:
                    return


class _Constants(ast.NodeTransformer):
    """Takes JSON's constants for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON[node.id]) if node.id in _JSON else node


def _call(element: ast.expr) -> tuple[str, dict[str, Any]]:
    assert isinstance(element, ast.Call) and not element.args
    arguments = {}
    for keyword in element.keywords:
        assert keyword.arg is not None
        arguments[keyword.arg] = ast.literal_eval(_Constants().visit(keyword.value))
    json.dumps(arguments)  # sets and bytes are no JSON
    return ast.unparse(element.func), arguments
