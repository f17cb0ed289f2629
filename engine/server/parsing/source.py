"""A text that arrives in pieces, read by coroutines that wait for more of it.

A parser is a generator: it yields where it needs more text, and is resumed when there is some or the text has
ended. Whatever is read is dropped, so that the work is linear in the text, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from ...scheduling.detokenizer import overlap

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
        """Append a piece."""
        self._text, self._at = self._text[self._at :] + text, 0
        self.has_ended = is_last

    def record(self) -> None:
        """Begin to keep what is read."""
        self._recorded = []

    def recorded(self) -> str:
        """End the recording; the text that was read since `record`."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def take(self, count: int) -> str:
        """Read `count` characters that are known to be there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(text)
        return text

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
        """Emit the text before the first of these markers; the marker, unread, or None at the end.

        None of them may begin with another one.
        """
        while True:
            place = self._find(stops)
            if place is not None:
                self._emit(place[0] - self._at, emit)
                return place[1]
            self._emit(self._num_decided(stops), emit)
            if self.has_ended:
                return None
            yield

    def rest(self, emit: Emit) -> Waiting:
        """Emit all that is left."""
        while True:
            self._emit(len(self._text) - self._at, emit)
            if self.has_ended:
                return
            yield

    def collect(self, stops: Sequence[str], limit: int) -> Generator[None, None, str | None]:
        """The text before the first of these markers, which stays unread; None at the end, or where it is
        longer than `limit` characters."""
        parts: list[str] = []
        size = 0
        while True:
            place = self._find(stops)
            count = self._num_decided(stops) if place is None else place[0] - self._at
            if (size := size + count) > limit:
                return None
            parts.append(self.take(count))
            if place is not None:
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
        places = [(at, stop) for stop in stops if (at := self._text.find(stop, self._at)) >= 0]
        return min(places, default=None)

    def _num_decided(self, stops: Sequence[str]) -> int:
        """Characters of the unread text that cannot belong to a marker, where it has no whole one."""
        length = len(self._text) - self._at
        if self.has_ended or not length:
            return length
        tail = self._text[max(self._at, len(self._text) - max(map(len, stops))) :]
        return length - max(overlap(tail, stop) for stop in stops)

    def _emit(self, count: int, emit: Emit) -> None:
        if count > 0:
            emit(self.take(count))
