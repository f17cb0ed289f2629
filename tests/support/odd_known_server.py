"""Servers of known latency in the forms that servers have, which tell their own TTFTs and TPOTs at /times."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from llmopt.bench.load import known_server as plain
from llmopt.bench.load.known_server import KnownLatencyProtocol, serve

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of server.

    Attributes:
        threads: connections served at once, each until it has been idle for `idle_seconds`; the others
            wait. None has no limit.
        backlog: connections that the system accepts before the server does.
        idle_seconds: time after which an idle connection is closed.
        closes: the server closes the connection after each response.
        is_http_1_0: responses without chunks, which end with the connection.
        usage_at_end: the usage of each event is zero until the last one.
    """

    threads: int | None = None
    backlog: int = 1024
    idle_seconds: float | None = None
    closes: bool = False
    is_http_1_0: bool = False
    usage_at_end: bool = False

    @property
    def head(self) -> bytes:
        version = b"HTTP/1.0" if self.is_http_1_0 else b"HTTP/1.1"
        lines = [version + b" 200 OK", b"Content-Type: text/event-stream"]
        lines += [] if self.is_http_1_0 else [b"Transfer-Encoding: chunked"]
        lines += [b"Connection: close"] if self.closes else []
        return b"\r\n".join(lines) + b"\r\n\r\n"


VARIANTS = {
    "plain": Variant(),
    "thread pool": Variant(threads=8, idle_seconds=5.0),
    "backlog of 16": Variant(backlog=16),
    "connection: close": Variant(closes=True),
    "HTTP/1.0": Variant(is_http_1_0=True),
    "short keep-alive": Variant(idle_seconds=0.1),
    "usage at the end": Variant(usage_at_end=True),
}


@dataclass(slots=True)
class Service:
    """State that all connections share: threads, and the server's own TTFT and TPOT of each request in
    milliseconds."""

    variant: Variant
    num_served: int = 0
    waiting: deque[OddProtocol] = field(default_factory=deque)
    ttfts_ms: list[float] = field(default_factory=list)
    tpots_ms: list[float] = field(default_factory=list)

    def times(self) -> bytes:
        """The TTFTs and TPOTs since they were last asked for."""
        body = json.dumps({"ttft": self.ttfts_ms, "tpot": self.tpots_ms}).encode()
        self.ttfts_ms.clear()
        self.tpots_ms.clear()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def begin(self, connection: OddProtocol) -> None:
        """Serve a connection now, or when a thread is free."""
        if self.variant.threads is not None and self.num_served >= self.variant.threads:
            self.waiting.append(connection)
            return
        self.num_served += 1
        connection.serve()

    def end(self, connection: OddProtocol) -> None:
        """A connection is closed: its thread takes the next one."""
        if not connection.is_served:
            self.waiting.remove(connection)
            return
        self.num_served -= 1
        if self.waiting:
            self.begin(self.waiting.popleft())


class OddProtocol(KnownLatencyProtocol):
    """A connection of a server of a form."""

    def __init__(self, ttft: float, itl: float, service: Service) -> None:
        super().__init__(ttft, itl)
        self._service = service
        self._variant = service.variant
        self._idle: asyncio.TimerHandle | None = None
        self.is_served = False
        self.head = self._variant.head
        self.end = DONE if self._variant.is_http_1_0 else KnownLatencyProtocol.end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._service.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._service.end(self)

    def serve(self) -> None:
        """A thread is free for this connection."""
        self.is_served = True
        self._watch_idle()
        self._read()

    def _read(self) -> None:
        if self.is_served:
            super()._read()

    def _answer(self, head: bytes, body: bytes, now: float) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if head.startswith(b"GET /times "):
            self._transport.write(self._service.times())
        else:
            super()._answer(head, body, now)

    def _usage(self, number: int, is_last: bool) -> int:
        return number if is_last or not self._variant.usage_at_end else 0

    def _framed(self, data: bytes) -> bytes:
        return data if self._variant.is_http_1_0 else super()._framed(data)

    def _written(self, received: float, now: float, number: int, count: int) -> None:
        if number == 1:
            self._first = now
            self._service.ttfts_ms.append((now - received) * 1000)
        if number == count and not self._transport.is_closing():
            self._service.tpots_ms.append((now - self._first) * 1000 / max(1, count - 1))

    def _ended(self) -> None:
        if self._variant.closes or self._variant.is_http_1_0:
            self._transport.close()
        self._watch_idle()

    def _watch_idle(self) -> None:
        if (seconds := self._variant.idle_seconds) is not None:
            self._idle = self._loop.call_later(seconds, self._transport.close)


@contextmanager
def odd_server(ttft_ms: float, itl_ms: float, variant: str = "plain") -> Iterator[int]:
    """Run the server, one of `VARIANTS`, in a process of its own; yields its port."""
    with plain.known_server(ttft_ms, itl_ms, variant, module=__name__) as port:
        yield port


if __name__ == "__main__":
    ttft, itl = (float(word) / 1000 for word in sys.argv[1:3])
    service = Service(VARIANTS[sys.argv[3]])
    asyncio.run(serve(lambda: OddProtocol(ttft, itl, service), service.variant.backlog))
