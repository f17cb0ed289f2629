"""The parser of an output: reasoning, then text with tool calls between.

Arguments of a call are given as they come. Text that may begin a call is held back until that is decided, and
is text if it is not a call. OpenAI's harmony format (gpt-oss) has messages in channels instead: `analysis` is
reasoning, `final` the answer, and a message to `functions.NAME` a call of that tool
(https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...scheduling.outputs import overlap
from .calls import MAX_HEADER, SPACE, CallReader, Emit, Reading, TextSource, Waiting
from .formats import HARMONY, SEPARATORS, Event, Reasoning, ReasoningFormat, Text, ToolFormat

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


def read_harmony(source: TextSource, events: list[Event], calls: CallReader) -> Waiting:
    """Read messages; text outside of them is text."""
    while True:
        marker = yield from source.until(
            [CHANNEL, START, *ENDS], lambda text: events.append(Text(text))
        )
        if marker is None:
            return
        source.take(len(marker))
        if marker in ENDS:
            continue
        header = yield from source.collect([MESSAGE], MAX_HEADER)
        if header is None:
            yield from source.until(ENDS, lambda _: None)
            continue
        source.take(len(MESSAGE))
        channel = header if marker == CHANNEL else header.partition(CHANNEL)[2]
        if recipient := _RECIPIENT.search(header):
            calls.begin(recipient[1])
            emit = calls.argue
        elif channel.startswith("analysis"):
            emit = lambda text: events.append(Reasoning(text))  # noqa: E731
        else:
            emit = lambda text: events.append(Text(text))  # noqa: E731
        yield from source.until([*ENDS, START], emit)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Formats of an output's reasoning and tool calls.

    Attributes:
        tools: format of tool calls; None: they are text.
        reasoning: format of the reasoning; None: it is text.
        in_reasoning: True if the prompt has begun the reasoning.
        schemas: schemas of the tools' parameters, by name.
        max_calls: number of calls after which others are dropped.
        stop_texts: texts of the EOS tokens, which a text with special tokens ends with.
        call_seed: seed of the calls' ids.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)
    max_calls: int | None = None
    stop_texts: Sequence[str] = ()
    call_seed: str = ""

    def needs_special_tokens(self, special: Collection[str]) -> bool:
        """True if a marker is a special token: by its format, or by the tokenizer, as in Granite 4."""
        parts = [part for part in (self.tools, self.reasoning) if part is not None]
        markers = {marker for part in parts for marker in (part.start, part.end)}
        return any(part.special for part in parts) or not markers.isdisjoint(special)


class OutputParser:
    """Parses one output, the choice of that index, as it comes; linear in its length, however it is cut."""

    def __init__(self, form: OutputFormat, choice: int = 0) -> None:
        self._form = form
        self._source = TextSource()
        self._events: list[Event] = []
        seed = f"{form.call_seed}/{choice}"
        self._calls = CallReader(self._source, self._events, form.schemas, form.max_calls, seed)
        self._reading = self._read()

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def feed(self, text: str, *, is_last: bool = False) -> list[Event]:
        """The events of a piece of the output; none may follow the last."""
        if is_last:
            stops = self._form.stop_texts
            text = next((text.removesuffix(end) for end in stops if text.endswith(end)), text)
        self._source.feed(text, is_last=is_last)
        next(self._reading, None)
        events, self._events[:] = _joined(self._events), []
        return events

    def _text(self, text: str) -> None:
        self._events.append(Text(text))

    def _read(self) -> Waiting:
        if self._form.tools is HARMONY:
            yield from read_harmony(self._source, self._events, self._calls)
            return
        if self._form.reasoning is not None:
            yield from self._read_reasoning(self._form.reasoning)
        if self._form.tools is None:
            yield from self._source.until((), self._text)
        else:
            yield from self._read_calls(self._form.tools)

    def _read_reasoning(self, form: ReasoningFormat) -> Waiting:
        """Reasoning at the beginning; whitespace around it is markup."""
        source = self._source
        if not self._form.in_reasoning:
            source.record()
            yield from source.skip(SPACE)
            if (yield from source.next_is(form.start)) is None:
                self._text(source.recorded())
                return
            source.take(len(form.start))
            source.recorded()
        yield from source.skip(SPACE)
        pending: list[str] = []

        def emit(text: str) -> None:
            whole = "".join(pending) + text
            shown = whole.rstrip(SPACE)
            pending[:] = [whole[len(shown) :]]
            if shown:
                self._events.append(Reasoning(shown))

        tools = self._form.tools
        stops = [form.end, *([tools.start] if tools is not None and tools.start else [])]
        while (marker := (yield from source.until(stops, emit))) is not None:
            source.take(len(marker))
            if marker == form.end or (yield from self._read_unended(marker, form.end, emit)):
                yield from source.skip(SPACE)
                return

    def _read_unended(self, marker: str, end: str, emit: Emit) -> Reading:
        """Calls that come before the end of the reasoning, as some models write them. Where there is none,
        what was read is reasoning, up to its end."""
        source, tools = self._source, self._form.tools
        assert tools is not None
        unread: list[str] = []
        yield from self._section(tools, marker, unread.append)
        text = "".join(unread)
        if not self.num_calls:
            at = text.find(end)
            at = len(text) - overlap(text, end) if at < 0 else at
            emit(text[:at])
            source.unread(text[at:])
            return False
        self._text(text)
        yield from source.skip(SPACE)
        while (following := (yield from source.next_is(marker, end))) == marker:
            source.take(len(marker))
            yield from self._section(tools, marker, self._text)
            yield from source.skip(SPACE)
        source.take(len(following or ""))
        return True

    def _read_calls(self, form: ToolFormat) -> Waiting:
        """Text, and calls between; whitespace after calls is markup."""
        source = self._source
        if form.bare:
            source.record()
            first = yield from source.skip(SPACE)
            space = source.recorded()
            if first and first in form.bare:
                yield from self._section(form, space, self._text, is_bare=True)
            else:
                self._text(space)
        while form.start:
            if self.num_calls:
                yield from source.skip(SPACE)
            if (yield from source.until([form.start], self._text)) is None:
                return
            source.take(len(form.start))
            yield from self._section(form, form.start, self._text)
        yield from source.until((), self._text)

    def _section(
        self, form: ToolFormat, opened: str, emit: Emit, *, is_bare: bool = False
    ) -> Waiting:
        """Calls up to the end marker; before the first of them, `opened` and what follows may be emitted."""
        source, markers = self._source, [*form.fillers, *([form.start] if form.start else [])]
        before = self.num_calls
        while True:
            source.record()
            following = yield from source.skip(SEPARATORS)
            ends = bool(form.end) and (yield from source.next_is(form.end or "")) is not None
            if not following or ends:
                source.take(len(form.end or "") if ends else 0)
                self._give_back(before, opened + source.recorded(), emit)
                return
            marker = (yield from source.next_is(*markers)) if markers else None
            if marker is not None:
                source.take(len(marker))
                opened += source.recorded()
                continue
            opened += source.recorded()
            source.record()
            if not (yield from self._calls.read(form, is_bare=is_bare)):
                rest = source.recorded()
                if self._give_back(before, opened + rest, emit) or form.end is None:
                    emit("" if self.num_calls == before else rest)
                    return
                # Between two calls: not text, and not a call.
                yield from source.until([form.end, form.start], lambda _: None)

    def _give_back(self, num_before: int, text: str, emit: Emit) -> bool:
        """Emit what was read, unless there was a call."""
        if self.num_calls > num_before:
            return False
        emit(text)
        return True


def _joined(events: Sequence[Event]) -> list[Event]:
    """Events without empty text, and neighbours of one kind as one."""
    joined: list[Event] = []
    for event in events:
        before = joined[-1] if joined else None
        if isinstance(event, Text | Reasoning):
            if not event.text:
                continue
            if type(before) is type(event):
                joined[-1] = type(event)(before.text + event.text)  # type: ignore[union-attr]
                continue
        joined.append(event)
    return joined
