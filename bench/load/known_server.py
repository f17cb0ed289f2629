"""Known-latency server: the reference against which the load client is certified.

It waits, writes, and reports in each event when it read the request and when it wrote, on the client's
clock (`time.perf_counter()` is one clock for all processes of a machine). This separates the client's error
from the server's lateness.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
NOTHING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HURRY_SECONDS = 0.0005  # an event due within this is written now


class KnownLatencyProtocol(asyncio.Protocol):
    """One connection: every request is answered with `max_tokens` events on a fixed timetable."""

    def __init__(self, ttft: float, itl: float) -> None:
        self._ttft, self._itl = ttft, itl
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
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
        if head.startswith(b"GET "):  # it has no list of models and no metrics
            self._transport.write(NOTHING)
            return
        count = json.loads(body[:length])["max_tokens"]
        self._plan(now, now + self._ttft, 1, count)

    def _plan(self, received: float, due: float, number: int, count: int) -> None:
        # The loop's clock has another origin, so the delay is passed, not the time.
        wait = max(0.0, due - time.perf_counter() - HURRY_SECONDS)
        self._loop.call_later(wait, self._write, received, due, number, count)

    def _write(self, received: float, due: float, number: int, count: int) -> None:
        reason = b'"length"' if number == count else b"null"
        event = (
            b'data: {"choices":[{"index":0,"text":" x","finish_reason":%s}],'
            b'"usage":{"prompt_tokens":1,"completion_tokens":%d},'
            b'"llmopt_times":{"received":%.7f,"sent":%.7f}}\n\n'
        ) % (reason, number, received, time.perf_counter())
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        if number == 1:
            chunk = HEAD + chunk
        if self._transport.is_closing():
            return
        self._transport.write(chunk + END if number == count else chunk)
        if number < count:
            self._plan(received, due + self._itl, number + 1, count)


async def serve(ttft: float, itl: float) -> None:
    """Serve on a free loopback port, which is printed, until stdin closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: KnownLatencyProtocol(ttft, itl), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    gc.freeze()
    gc.disable()
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def known_server(ttft_ms: float, itl_ms: float) -> Iterator[int]:
    """Run the server in a separate process; yields its port."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(ttft_ms), str(itl_ms)],
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
    asyncio.run(serve(float(sys.argv[1]) / 1000, float(sys.argv[2]) / 1000))
