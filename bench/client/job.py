"""Messages between the fleet and its load workers: jobs, exchanges and reports, as picklable values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .answer import Answer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server that requests are sent to.

    Attributes:
        host, port: to connect to.
        is_tls: whether to use TLS; `verify_tls`: whether certificates are verified.
        head: the request line and every header but the length, ready to send.
        timeout: seconds for one request from sending to the end of its response.
        is_pooled: responses hold embeddings or scores, not tokens.
    """

    host: str
    port: int
    head: bytes
    is_tls: bool = False
    verify_tls: bool = True
    timeout: float = 600.0
    is_pooled: bool = False


MARK = b"\0"
"""In an encoded body, where the first token (or its text) of a cycle goes. JSON has no such byte."""


def encoded_message(role: str, content: str) -> bytes:
    """A chat message as JSON."""
    return json.dumps({"role": role, "content": content}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """A later turn of a conversation: the body around its messages, and what it appends to them.

    Attributes:
        messages: the new messages as JSON objects, comma-separated.
        think: seconds from the end of the answer before to when this turn is due.
        answer: the data set's answer to the turn before as a JSON object; None sends back the server's own.
    """

    head: bytes
    messages: bytes
    tail: bytes
    think: float = 0.0
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One request or conversation, encoded before the clock starts, due seconds after the origin.

    `body` is that of the first turn, and `messages` are its messages where `turns` follow.
    """

    request_id: str
    body: bytes
    due: float = 0.0
    messages: bytes = b""
    turns: tuple[EncodedTurn, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """A pass of fixed duration: its seconds, and those from one cycle over the requests to the next."""

    seconds: float
    period: float


@dataclass(frozen=True, slots=True)
class Job:
    """One pass of one worker.

    Attributes:
        limit: maximum requests in flight over all workers; None is no limit.
        places: (read, write) file descriptors of the permit pipe, which holds a byte per free concurrency
            permit; None without a limit.
        marks: what replaces `MARK` in the bodies of each cycle.
        window: repeat the requests until it closes, and drain what is in flight then; None is one cycle.
        burden: seconds of every 50 ms in which the worker busy-waits, to test that a starved client is
            detected.
    """

    endpoint: Endpoint
    requests: tuple[EncodedRequest, ...]
    limit: int | None
    burden: float = 0.0
    permits: tuple[int, int] | None = None
    marks: tuple[bytes, ...] = (b"",)
    window: Window | None = None


@dataclass(slots=True)
class Exchange:
    """One request and its response. Times are `time.perf_counter()`, one clock for all processes.

    Attributes:
        request_id: of the encoded request, the same for all its turns and cycles.
        due: seconds from the origin.
    """

    request_id: str
    sent: float
    ended: float
    answer: Answer = field(default_factory=Answer)
    due: float = 0.0
    turn: int = 0
    cycle: int = 0


@dataclass(slots=True)
class Report:
    """A worker's results at the end of a pass.

    Attributes:
        lag_ms: event-loop lag (wake-up after the requested time), sampled through the pass: mean, p99, max.
        late_connections: connections opened after the clock had started.
    """

    exchanges: list[Exchange]
    lag_ms: Mapping[str, float]
    late_connections: int = 0
