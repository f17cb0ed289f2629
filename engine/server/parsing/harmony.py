"""OpenAI's harmony format (gpt-oss): messages in channels.

`analysis` is reasoning, `final` the answer, and a message to `functions.NAME` a call of that tool
(https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re

from .calls import MAX_HEADER, CallReader
from .events import Event, Reasoning, Text
from .source import Source, Waiting

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


def read_harmony(source: Source, events: list[Event], calls: CallReader) -> Waiting:
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
