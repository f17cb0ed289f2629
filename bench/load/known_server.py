"""A server of known latency, on a fixed timetable, in the forms that servers have.

It waits, writes, and reports in each event when it read the request and when it wrote the event.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

NOTHING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
HURRY_SECONDS = 0.0005  # an event due within this is written now


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

    def framed(self, data: bytes) -> bytes:
        return data if self.is_http_1_0 else b"%x\r\n%s\r\n" % (len(data), data)

    @property
    def end(self) -> bytes:
        return self.framed(DONE) + (b"" if self.is_http_1_0 else b"0\r\n\r\n")


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
    """State that all connections share: timetable in seconds, threads, and the server's own TTFT and TPOT
    of each request in milliseconds."""

    ttft: float
    itl: float
    variant: Variant
    num_served: int = 0
    waiting: deque[KnownLatencyProtocol] = field(default_factory=deque)
    ttfts_ms: list[float] = field(default_factory=list)
    tpots_ms: list[float] = field(default_factory=list)

    def times(self) -> bytes:
        """The TTFTs and TPOTs since they were last asked for."""
        body = json.dumps({"ttft": self.ttfts_ms, "tpot": self.tpots_ms}).encode()
        self.ttfts_ms.clear()
        self.tpots_ms.clear()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def begin(self, connection: KnownLatencyProtocol) -> None:
        """Serve a connection now, or when a thread is free."""
        if self.variant.threads is not None and self.num_served >= self.variant.threads:
            self.waiting.append(connection)
            return
        self.num_served += 1
        connection.serve()

    def end(self, connection: KnownLatencyProtocol) -> None:
        """A connection is closed: its thread takes the next one."""
        if not connection.is_served:
            self.waiting.remove(connection)
            return
        self.num_served -= 1
        if self.waiting:
            self.begin(self.waiting.popleft())


class KnownLatencyProtocol(asyncio.Protocol):
    """One connection: every request is answered with `max_tokens` events on a fixed timetable."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._idle: asyncio.TimerHandle | None = None
        self.is_served = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._service.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._service.end(self)

    def serve(self) -> None:
        """A thread is free for this connection."""
        self.is_served = True
        self._watch_idle()
        self._read()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.is_served:
            self._read()

    def _read(self) -> None:
        now = time.perf_counter()
        head, blank, body = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self._buffer = body[length:]
        if self._idle is not None:
            self._idle.cancel()
        if not head.startswith(b"POST "):  # it has no list of models and no metrics
            is_times = head.startswith(b"GET /times ")
            self._transport.write(self._service.times() if is_times else NOTHING)
            return
        request = json.loads(body[:length])
        count = request.get("max_tokens") or request.get("max_completion_tokens")
        if count is None:  # other clients try other paths
            self._transport.write(NOTHING)
            return
        self._plan(now, now + self._service.ttft, 1, count)

    def _plan(self, received: float, due: float, number: int, count: int) -> None:
        # The loop's clock has another origin, so the delay is passed, not the time.
        wait = max(0.0, due - time.perf_counter() - HURRY_SECONDS)
        self._loop.call_later(wait, self._write, received, due, number, count)

    def _write(self, received: float, due: float, number: int, count: int) -> None:
        variant, now = self._service.variant, time.perf_counter()
        is_last = number == count
        event = (
            b'data: {"object":"text_completion",'
            b'"choices":[{"index":0,"text":" x","finish_reason":%s}],'
            b'"usage":{"prompt_tokens":1,"completion_tokens":%d},'
            b'"llmopt_times":{"received":%.7f,"sent":%.7f}}\n\n'
        ) % (
            b'"length"' if is_last else b"null",
            number if is_last or not variant.usage_at_end else 0,
            received,
            now,
        )
        if number == 1:
            self._first = now
            self._service.ttfts_ms.append((now - received) * 1000)
        if self._transport.is_closing():
            return
        chunk = (variant.head if number == 1 else b"") + variant.framed(event)
        self._transport.write(chunk + variant.end if is_last else chunk)
        if not is_last:
            self._plan(received, due + self._service.itl, number + 1, count)
            return
        self._service.tpots_ms.append((now - self._first) * 1000 / max(1, count - 1))
        if variant.closes or variant.is_http_1_0:
            self._transport.close()
        self._watch_idle()

    def _watch_idle(self) -> None:
        if (seconds := self._service.variant.idle_seconds) is not None:
            self._idle = self._loop.call_later(seconds, self._transport.close)


async def serve(ttft: float, itl: float, variant: Variant) -> None:
    """Serve on a free loopback port, which is printed, until stdin closes."""
    loop = asyncio.get_running_loop()
    service = Service(ttft, itl, variant)
    server = await loop.create_server(
        lambda: KnownLatencyProtocol(service), "127.0.0.1", 0, backlog=variant.backlog
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    gc.freeze()
    gc.disable()
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def known_server(ttft_ms: float, itl_ms: float, variant: str = "plain") -> Iterator[int]:
    """Run the server, one of `VARIANTS`, in a process of its own; yields its port."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(ttft_ms), str(itl_ms), variant],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    ttft_ms, itl_ms = map(float, sys.argv[1:3])
    asyncio.run(serve(ttft_ms / 1000, itl_ms / 1000, VARIANTS[sys.argv[3]]))
