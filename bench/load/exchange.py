"""Messages between the fleet and its load workers, as picklable values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

MARK = b"\0"
"""In an encoded body, where the first token (or its text) of a cycle goes. JSON has no such byte."""


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


def encoded_message(role: str, content: str) -> bytes:
    """A chat message as JSON."""
    return json.dumps({"role": role, "content": content}, separators=(",", ":")).encode()


def turn_due(think: float, since: float | None, opened: float, ended: float) -> float:
    """When a turn is due: `think` seconds after the answer before `ended`; with `since`, so long after the
    conversation `opened`, or when that answer has ended if it is later."""
    return ended + think if since is None else max(ended, opened + since)


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """A later turn of a conversation: the body around its messages, and what it appends to them.

    Attributes:
        messages: the new messages as JSON objects, comma-separated.
        think, since: when this turn is due, as `turn_due` takes them.
        answer: the data set's answer to the turn before as a JSON object; None sends back the server's own.
    """

    head: bytes
    messages: bytes
    tail: bytes
    think: float = 0.0
    since: float | None = None
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One request or conversation, encoded before the clock starts, due seconds after the origin.

    `body` is that of the first turn, and `messages` are its messages where `turns` follow. The client
    leaves the last turn `cancel` seconds after sending it. `waiting` are (turn, request) of those that begin
    when that turn has ended; their `due` counts from there.
    """

    request_id: str
    body: bytes
    due: float = 0.0
    messages: bytes = b""
    turns: tuple[EncodedTurn, ...] = ()
    cancel: float | None = None
    waiting: tuple[tuple[int, EncodedRequest], ...] = ()

    @property
    def num_requests(self) -> int:
        """Requests of all turns, and of those that wait for them."""
        return 1 + len(self.turns) + sum(request.num_requests for _, request in self.waiting)


@dataclass(frozen=True, slots=True)
class PassWindow:
    """A pass of fixed duration: its seconds, and those from one cycle over the requests to the next."""

    seconds: float
    period: float


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One pass of one worker.

    Attributes:
        limit: maximum requests in flight over all workers; None is no limit.
        permits: (read, write) file descriptors of the permit pipe, which holds a byte per free concurrency
            permit; None without a limit.
        opened_ahead: connections to open before the clock starts.
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
    window: PassWindow | None = None
    opened_ahead: int = 0


@dataclass(slots=True)
class Answer:
    """One parsed response.

    Attributes:
        times: when each chunk was read, by `time.perf_counter()`.
        texts: the text of each chunk; empty where a token gave no text yet.
        tokens: tokens of each chunk where the server reports usage per chunk, else empty.
        content: text of the answer without its reasoning, which `texts` holds too.
        total: output tokens by the server's usage, without hidden ones, or None.
        hidden_tokens: reasoning tokens that the server counted and did not stream.
        unread: names of the filled fields that the parser does not know, with the chunks that hold them.
        prompt_tokens, cached_tokens: prompt tokens, and those of them from the prefix cache, by the
            server's usage, or None.
        server_times: when the server had read the request, then when it wrote each chunk; only from the
            known-latency server (`known_server`).
        model: the name that the server signs with.
        num_results: embeddings or scores of a pooling response.
        error: why the response is invalid; empty if it is valid.
    """

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    content: str = ""
    total: int | None = None
    hidden_tokens: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    server_times: list[float] = field(default_factory=list)
    model: str = ""
    num_results: int = 0
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class Exchange:
    """One request and its response. Times are `time.perf_counter()`, one clock for all processes.

    Attributes:
        request_id: of the encoded request, the same for all its turns and cycles.
        due: seconds from the origin.
        cancelled: the client left before the end, as it was told.
    """

    request_id: str
    sent: float
    ended: float
    answer: Answer = field(default_factory=Answer)
    due: float = 0.0
    turn: int = 0
    cycle: int = 0
    cancelled: bool = False


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
