"""Bounds of a connection: its head, its body and its reader, before the application has seen a key.

h11 takes about 20 µs for a header line or a chunk. So it gets a head once the whole of it has arrived within
the limits, and a body only as far as the application asks for it, in pieces with turns for other clients.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from ..protocol.errors import error_body
from ..protocol.server_options import ServerOptions
from .request_record import FULL_KEY, WRITE_KEY

MAX_HEADER_LINES = 256
RESERVED_CONNECTIONS = 64
"""Connections beyond `--max-connections`, for requests of `middleware.PROBES`."""
PIECE_BYTES = 4096
"""Bytes of a chunked body between two turns of other clients; at the same time the limit of its trailers."""
CHUNK_BYTES, SPARE_CHUNKS = 256, 256
"""Mean size that the chunks of a body must have, but for the first ones: those of common clients have 1 kB or
more."""
LINGER_SECONDS = 2.0
"""Time for which what still comes is dropped unread after a refusal. Closing at once would reset the
connection before the client has the response."""

BEGUN_AT_A_TIME = 4
"""Requests that begin in one turn of the event loop: a thousand at once would take it for a second."""

_CODES = {408: "timeout", 431: "headers_too_large", 503: "engine_unavailable"}
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_KEY_LINE = re.compile(rb"\n(?:authorization|x-api-key):[^\n]*", re.IGNORECASE)


def bounded_connections(options: ServerOptions) -> type[BoundedConnection]:
    """uvicorn's protocol class with the limits of `options`."""
    shared = {"options": options, "quiet": {}, "refused": set(), "heads": {}}
    turns = {"turns": asyncio.Semaphore(BEGUN_AT_A_TIME), "turns_of": WeakValueDictionary()}
    return type("ConfiguredConnection", (BoundedConnection,), shared | turns)


class BoundedConnection(H11Protocol):
    """A connection that is closed where a request's head is not complete in time, or where its client takes
    nothing of a response for too long: both would stay open for good. Beyond the limit of connections the
    oldest is closed on which the server waits, of the address that has most of those. Where it waits on none,
    a connection more serves probes alone.

    Attributes:
        quiet: connections on which the server waits for a request, or the rest of one, by address.
        refused: connections that are being closed for another.
        heads: connections whose heads wait for the next turns of the event loop, with the head, by client.
        turns: limiter that requests wait for before they begin, but for `/health` and `/ready`.
        turns_of: limiters that each client's own requests wait for before, so that no other client's do.
    """

    options: ServerOptions
    quiet: dict[str, dict[BoundedConnection, None]]
    refused: set[BoundedConnection]
    heads: dict[tuple[str, bytes], deque[tuple[BoundedConnection, bytes]]]
    turns: asyncio.Semaphore
    turns_of: WeakValueDictionary[tuple[str, bytes], asyncio.Semaphore]
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _Parser()
        self._app, self.app = self.app, self._answer
        self._received = bytearray()
        self._num_searched = 0
        self._left: int | None = 0
        self._is_asked = self._is_ending = self._has_waiting_head = False
        # So that `pause_writing` is called for unsent bytes. A limit of 0 would stop a TLS transport for
        # good: it pauses at the limit, and not only above it.
        transport.set_write_buffer_limits(high=1, low=0)
        self._count()
        if self._num_open > self.options.max_connections:
            oldest = next(iter(max(self.quiet.values(), key=len)))
            limit = self.options.max_connections + RESERVED_CONNECTIONS
            if oldest is not self or self._num_open > limit:
                self.refused.add(oldest)
                if not oldest._is_ending:  # else it has its refusal, and nothing can follow
                    problem = "too many connections"
                    oldest.transport.write(refusal(503, problem, "too_many_connections"))
                oldest.transport.close()
                oldest._count()
        if not transport.is_closing():
            self._await_head()

    @property
    def _num_open(self) -> int:
        return len(self.connections) - len(self.refused)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the body as the application asks for it. Let it write the chunks of a stream itself: h11 takes
        longer for each than all else."""
        cycle = self.cycle
        if scope["http_version"] == "1.1":  # else its body is not sent in chunks
            scope[WRITE_KEY] = partial(self._write, cycle)
        num_busy = self._num_open - 1
        if num_busy >= self.options.max_connections:  # the sum is over thousands of addresses
            is_quiet = self in self.quiet.get(self._address, {})
            num_busy += is_quiet - sum(map(len, self.quiet.values()))
        scope[FULL_KEY] = num_busy >= self.options.max_connections
        headers = dict(scope["headers"])
        is_chunked, length = b"transfer-encoding" in headers, headers.get(b"content-length")
        self._left = None if is_chunked else int(length or 0)
        is_ambiguous = is_chunked and length is not None  # RFC 9112, 6.1

        async def respond(message: Any) -> None:
            if message["type"] == "http.response.start":
                # What h11 has of the next request is beyond the limits of a head.
                is_behind = cycle.more_body or self.conn.trailing_data[0]
                if is_ambiguous or is_behind:
                    message["headers"] = [*message.get("headers", ()), CLOSE_HEADER]
                    writing = self.transport.write, self.transport.is_closing
                    cycle.transport = SimpleNamespace(  # type: ignore[assignment]
                        write=writing[0], is_closing=writing[1], close=self._linger
                    )
            await send(message)

        try:
            if scope["path"] not in ("/health", "/ready"):
                key = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
                own = asyncio.Semaphore(BEGUN_AT_A_TIME)
                own = self.turns_of.setdefault((self._address, key), own)
                async with own, self.turns:
                    await asyncio.sleep(0)
            await self._app(scope, partial(self._receive, cycle), respond)
        except asyncio.CancelledError:  # uvicorn's, after the drain
            self._refuse(503, "the server is stopping")

    async def _receive(self, cycle: RequestResponseCycle) -> Any:
        if cycle is self.cycle and cycle.more_body:
            await asyncio.sleep(0)
            self._is_asked = True
            self._feed(cycle)
        message = await cycle.receive()
        self._is_asked = False
        return message

    def _feed(self, cycle: RequestResponseCycle) -> None:
        """Give h11 a piece of the body, until a message has come of it for the application that waits."""
        if not self._is_asked or not cycle.more_body or cycle.response_started or self._is_ending:
            return
        size = PIECE_BYTES if self._left is None else min(self._left, HIGH_WATER_LIMIT)
        if piece := bytes(self._received[:size]):
            del self._received[:size]
            if self._left is not None:
                self._left -= len(piece)
            super().data_received(piece)
            self._count()
            if self._received and not cycle.message_event.is_set():
                self.loop.call_soon(self._feed, cycle)

    async def _write(self, cycle: RequestResponseCycle, data: bytes) -> None:
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if data and not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _count(self) -> None:
        """Count the connection among the quiet ones of its address, or no longer."""
        quiet, cycle = self.quiet.setdefault(self._address, {}), self.cycle
        is_quiet = cycle is None or cycle.response_complete or cycle.more_body
        if is_quiet and not self._has_waiting_head and not self.transport.is_closing():
            quiet[self] = None
        else:
            quiet.pop(self, None)
            if not quiet:
                del self.quiet[self._address]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._take_head()
        self._count()

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        self._unset_keepalive_if_required()
        self._received += data
        self._take_head()
        if self.cycle is not None:
            self._feed(self.cycle)
        if len(self._received) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self._count()

    def _take_head(self) -> None:
        """Give h11 the head of a request once it has arrived, or let it wait behind others of its client."""
        if self._has_waiting_head:
            return
        if self.conn.their_state is h11.IDLE and self._received and not self._is_ending:
            head = _END_OF_HEAD.search(self._received, max(0, self._num_searched - 2))
            self._num_searched = length = len(self._received) if head is None else head.end()
            if length > self.options.max_header_bytes:
                limit = f"the limit is {self.options.max_header_bytes} bytes"
                self._refuse(431, f"request line and headers are too long: {limit}")
            elif self._received.count(b"\n", 0, length) > MAX_HEADER_LINES:
                self._refuse(431, f"more than {MAX_HEADER_LINES} lines of headers")
            elif head is not None or self._received[0] <= 32:
                # No request begins with such a byte: it is TLS, or nothing.
                received, self._num_searched = bytes(self._received[:length]), 0
                del self._received[:length]
                self._parse_in_turn(received)
            else:
                self._await_head()
        if self.conn.their_state is not h11.IDLE:
            self._head_timer = _cancelled(self._head_timer)

    def _parse_in_turn(self, head: bytes) -> None:
        """Parse a head now, or after others of its client: a thousand in one turn of the event loop would
        take it for a third of a second. Probes do not wait."""
        if head.startswith((b"GET /health ", b"GET /ready ")):
            super().data_received(head)
            return
        key_line = _KEY_LINE.search(head)
        client = self._address, b"" if key_line is None else key_line[0]
        if client in self.heads:
            self._has_waiting_head = True
            self._head_timer = _cancelled(self._head_timer)
            self._unset_keepalive_if_required()
            self.heads[client].append((self, head))
        else:
            self.heads[client] = deque()
            self.loop.call_soon(self._parse_waiting, client)
            super().data_received(head)

    def _parse_waiting(self, client: tuple[str, bytes]) -> None:
        heads = self.heads[client]
        if not heads:
            del self.heads[client]
            return
        self.loop.call_soon(self._parse_waiting, client)  # first: an error in one stops no other
        for _ in range(min(len(heads), BEGUN_AT_A_TIME)):
            connection, head = heads.popleft()
            connection._has_waiting_head = False
            if not (connection._is_ending or connection.transport.is_closing()):
                H11Protocol.data_received(connection, head)
                connection.data_received(b"")  # go on with what has come after the head
            connection._count()

    def shutdown(self) -> None:
        if self._has_waiting_head:
            self._refuse(503, "the server is stopping")
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancelled(self._head_timer)
        self._send_timer = _cancelled(self._send_timer)
        super().connection_lost(exc)
        self.refused.discard(self)
        self._count()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._send_timer = _cancelled(self._send_timer)
        super().resume_writing()

    def _await_head(self) -> None:
        """Start the clock, unless it runs: more bytes of the same head give no more time."""
        if self._head_timer is None:
            seconds = self.options.header_timeout_seconds
            problem = f"the request was not complete after {seconds:g} s"
            self._head_timer = self.loop.call_later(seconds, self._refuse, 408, problem)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, problem: str) -> None:
        """Respond to what is no request or body, unless a response has begun, and close the connection."""
        if self._is_ending or self.transport.is_closing():
            return
        if (cycle := self.cycle) is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(refusal(status, problem))
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        """Close for writing now, for reading when the client does, or after `LINGER_SECONDS`."""
        self._is_ending = True
        self._received.clear()
        self._head_timer = _cancelled(self._head_timer)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has closed the connection
                self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _await_reader(self) -> None:
        """Abort the connection unless the client takes a byte in time; `close` would wait for it for good."""
        num_unsent = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < num_unsent:
                self._await_reader()
            else:
                self.transport.abort()

        _cancelled(self._send_timer)
        self._send_timer = self.loop.call_later(self.options.send_timeout_seconds, look)


class _Parser(h11.Connection):
    """h11 for a server, with a bound on the number of chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, PIECE_BYTES)
        self._spare_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._spare_bytes = SPARE_CHUNKS * CHUNK_BYTES
        elif isinstance(event, h11.Data):
            self._spare_bytes += len(event.data) - CHUNK_BYTES * event.chunk_start
            if self._spare_bytes < 0:
                raise h11.RemoteProtocolError(f"chunks have {CHUNK_BYTES} bytes in the mean")
        return event


def refusal(status: int, problem: str, code: str | None = None) -> bytes:
    """The response to a client that has sent no whole request, after which the connection is closed."""
    body = json.dumps(error_body(status, problem, code=code or _CODES.get(status))).encode()
    lines = [f"HTTP/1.1 {status} {STATUS_PHRASES[status].decode()}", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += ["Retry-After: 1"] if status == 503 else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
