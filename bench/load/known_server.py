"""A server of known latency, on a fixed timetable.

It waits, writes, and reports in each event when it read the request and when it wrote the event.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

NOTHING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
HURRY_SECONDS = 0.0005  # an event due within this is written now


class KnownLatencyProtocol(asyncio.Protocol):
    """One connection: every request is answered with `max_tokens` events on a fixed timetable in seconds."""

    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    end = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    def __init__(self, ttft: float, itl: float) -> None:
        self._ttft, self._itl = ttft, itl
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
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
        if len(body) >= length:
            self._buffer = body[length:]
            self._answer(head, body[:length], now)

    def _answer(self, head: bytes, body: bytes, now: float) -> None:
        """Plan the events of a request; it has no list of models, no metrics, and no other paths."""
        request = json.loads(body) if head.startswith(b"POST ") else {}
        count = request.get("max_tokens") or request.get("max_completion_tokens")
        if count is None:
            self._transport.write(NOTHING)
        else:
            self._plan(now, now + self._ttft, 1, count)

    def _plan(self, received: float, due: float, number: int, count: int) -> None:
        # The loop's clock has another origin, so the delay is passed, not the time.
        wait = max(0.0, due - time.perf_counter() - HURRY_SECONDS)
        self._loop.call_later(wait, self._write, received, due, number, count)

    def _write(self, received: float, due: float, number: int, count: int) -> None:
        now, is_last = time.perf_counter(), number == count
        event = (
            b'data: {"object":"text_completion",'
            b'"choices":[{"index":0,"text":" x","finish_reason":%s}],'
            b'"usage":{"prompt_tokens":1,"completion_tokens":%d},'
            b'"llmopt_times":{"received":%.7f,"sent":%.7f}}\n\n'
        ) % (b'"length"' if is_last else b"null", self._usage(number, is_last), received, now)
        self._written(received, now, number, count)
        if self._transport.is_closing():
            return
        chunk = (self.head if number == 1 else b"") + self._framed(event)
        self._transport.write(chunk + self.end if is_last else chunk)
        if is_last:
            self._ended()
        else:
            self._plan(received, due + self._itl, number + 1, count)

    # Tests put other forms of servers in the place of these.

    def _usage(self, number: int, is_last: bool) -> int:
        return number

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    def _written(self, received: float, now: float, number: int, count: int) -> None: ...

    def _ended(self) -> None: ...


async def serve(protocol: Callable[[], KnownLatencyProtocol], backlog: int = 1024) -> None:
    """Serve on a free loopback port, which is printed, until stdin closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", 0, backlog=backlog)
    print(server.sockets[0].getsockname()[1], flush=True)
    gc.freeze()
    gc.disable()
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def known_server(
    ttft_ms: float, itl_ms: float, *arguments: str, module: str = __name__
) -> Iterator[int]:
    """Run the server in a process of its own; yields its port."""
    with subprocess.Popen(
        [sys.executable, "-m", module, str(ttft_ms), str(itl_ms), *arguments],
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
    ttft, itl = (float(word) / 1000 for word in sys.argv[1:3])
    asyncio.run(serve(lambda: KnownLatencyProtocol(ttft, itl)))
