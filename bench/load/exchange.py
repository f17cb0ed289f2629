"""Picklable messages between the fleet and its load workers, and their HTTP/1.1 client protocol.

httpcore timestamps when its reader task is scheduled, after every other: with many streams that delay is
client error, and h11 takes 23 µs a read, not 3. Here the timestamp is the first thing `data_received` does,
and bodies are parsed after the pass.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

MARK = b"\0"
"""Mark in an encoded body for the first token (or its text) of a cycle. JSON has no such byte."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server that requests are sent to: their `head` without the length, and seconds for a whole one.
    `is_pooled`: responses hold embeddings or scores, not tokens."""

    host: str
    port: int
    head: bytes
    is_tls: bool = False
    verify_tls: bool = True
    timeout: float = 600.0
    is_pooled: bool = False


def encoded_message(role: str, content: str) -> bytes:
    return json.dumps({"role": role, "content": content}, separators=(",", ":")).encode()


def turn_due(think: float, since: float | None, opened: float, ended: float) -> float:
    """When a turn is due: `think` seconds after the last answer, or `since` after the conversation opened."""
    return ended + think if since is None else max(ended, opened + since)


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """A later turn of a conversation: the body around its messages, and what it appends to them.

    Attributes:
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
    """One request or conversation, encoded before the clock starts, due seconds after the origin. `body` is
    the first turn's, and `messages` are its messages where `turns` follow. The client leaves the last turn
    `cancel` seconds after sending it. `waiting` are (turn, request) pairs that begin when that turn has
    ended; their `due` counts from there."""

    request_id: str
    body: bytes
    due: float = 0.0
    messages: bytes = b""
    turns: tuple[EncodedTurn, ...] = ()
    cancel: float | None = None
    waiting: tuple[tuple[int, EncodedRequest], ...] = ()

    @property
    def num_requests(self) -> int:
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
        permits: (read, write) file descriptors of the permit pipe, which holds a byte per free permit.
        marks: replacements of `MARK` in the bodies of each cycle.
        window: time until which the requests are repeated; None is one cycle.
        burden: seconds of every 50 ms of busy waiting, to test that a starved client is detected.
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
        times: read time of each chunk (`time.perf_counter`).
        texts: the text of each chunk; empty where a token gave no text yet.
        tokens: tokens of each chunk where the server reports usage per chunk, else empty.
        content: text of the answer without its reasoning, which `texts` holds too.
        hidden_tokens: reasoning tokens that the server counted and did not stream.
        unread: {filled field that the parser does not know: chunks that hold it}.
        prompt_tokens, cached_tokens: prompt tokens, and those from the prefix cache, by the server's usage.
        server_times: times at which `known_server` had read the request and wrote each chunk.
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
    """A request and its response, in `time.perf_counter()`; `due` from the origin; one id for all turns."""

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
    """A worker's results of a pass, with event-loop lag (mean, p99, max), and connections opened late."""

    exchanges: list[Exchange]
    lag_ms: Mapping[str, float]
    late_connections: int = 0


MAX_HEAD_BYTES = 1 << 16


class NotHttp(Exception):
    """The peer does not speak HTTP/1.1."""


class Response:
    """One response as it arrives. `chunks` are (time of the read, body bytes of that read)."""

    def __init__(self) -> None:
        self.status = 0
        self.is_http_1_0 = False
        self.headers: dict[str, str] = {}
        self.chunks: list[tuple[float, bytes]] = []
        self.is_whole = False
        self._rest = b""
        self._mode = "head"
        self._left = 0  # bytes of the body, or of the current chunk with its CRLF
        self._size = False  # whether a chunk-size line, or a trailer, comes next

    @property
    def is_head_whole(self) -> bool:
        return self._mode != "head"

    @property
    def has_begun(self) -> bool:
        return self.is_head_whole or bool(self._rest)

    @property
    def keeps_alive(self) -> bool:
        """HTTP/1.1 keeps a connection unless the server closes it, HTTP/1.0 does not (RFC 9112, 9.3)."""
        options = {word.strip() for word in self.headers.get("connection", "").split(",")}
        kept = "keep-alive" in options if self.is_http_1_0 else "close" not in options
        return kept and self._mode != "until close"

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, data in self.chunks)

    def feed(self, now: float, data: bytes) -> None:
        """Parse the data of one read. Raises NotHttp: the data is not an HTTP/1.1 response."""
        if self._mode == "head":
            self._rest += data
            end = self._rest.find(b"\r\n\r\n")
            if not self._rest.startswith(b"HTTP/1."[: len(self._rest)]):
                raise NotHttp(f"not an HTTP response: it begins with {self._rest[:16]!r}")
            if end < 0:
                if len(self._rest) > MAX_HEAD_BYTES:
                    raise NotHttp("not an HTTP response: its head has no end")
                return
            head, data, self._rest = self._rest[:end], self._rest[end + 4 :], b""
            self._read_head(head)
            if 100 <= self.status < 200:
                self.__init__()
            if self._mode == "head":  # that was an interim response, the final one is yet to come
                self.feed(now, data)
                return
        if self._mode == "chunked":
            data = self._unchunk(data)
        elif self._mode == "length":
            self._left -= len(data)
            self.is_whole = self._left <= 0
        if data:
            self.chunks.append((now, data))

    def end_of_stream(self) -> None:
        """The peer closed: ends a body without content-length or chunked encoding."""
        if self._mode == "until close":
            self.is_whole = True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        try:
            version, status, *_ = first.split(" ", 2)
            self.status, self.is_http_1_0 = int(status), version == "HTTP/1.0"
        except ValueError as error:
            raise NotHttp(f"not an HTTP response: its first line is {first[:40]!r}") from error
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip().lower()
        if "chunked" in self.headers.get("transfer-encoding", ""):
            self._mode, self._size = "chunked", True
        elif "content-length" in self.headers:
            try:
                self._left = int(self.headers["content-length"])
            except ValueError as error:
                raise NotHttp("not an HTTP response: its content-length is no number") from error
            self._mode, self.is_whole = "length", self._left == 0
        else:
            self._mode = "until close"

    def _unchunk(self, data: bytes) -> bytes:
        """The body bytes in `data` (chunked encoding); an incomplete size line is kept."""
        data, self._rest = self._rest + data, b""
        body, at = [], 0
        while at < len(data):
            if not self._size:
                taken = min(self._left, len(data) - at)
                # The last two bytes are the CRLF.
                body.append(data[at : at + min(taken, max(self._left - 2, 0))])
                at, self._left = at + taken, self._left - taken
                self._size = self._left == 0
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                if len(self._rest) > MAX_HEAD_BYTES:
                    raise NotHttp("a chunk's size has no end")
                break
            line, at = data[at:end], end + 2
            if self._left < 0:  # in the trailer, ended by an empty line
                self.is_whole = self.is_whole or not line
                continue
            try:
                size = int(line.split(b";", 1)[0], 16)
            except ValueError as error:
                raise NotHttp(f"a chunk's size is no number: {line[:20]!r}") from error
            self._left, self._size = (size + 2, False) if size else (-1, True)
        return b"".join(body)


def tls_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Connection(asyncio.Protocol):
    """A keep-alive connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_open = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    async def exchange(self, message: bytes, response: Response) -> float:
        """Send a request; returns when, once `response` is whole. NotHttp, or ConnectionError."""
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._response = response
        sent = time.perf_counter()
        self._transport.write(message)
        try:
            await self._waiter
        finally:
            self._response = self._waiter = None
            if not response.is_whole or not response.keeps_alive:
                self.close()
        return sent

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        response = self._response
        if response is None:
            self.close()
            return
        try:
            response.feed(now, data)
            if response.is_whole:
                self._end(None)
        except NotHttp as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._response is not None:
            self._response.end_of_stream()
            whole = self._response.is_whole
            self._end(None if whole else exc or ConnectionResetError("the server closed"))

    def _end(self, error: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            if error is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(error)
