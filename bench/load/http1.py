"""Minimal HTTP/1.1 client protocol: every read is timestamped in `data_received`.

An HTTP library timestamps when its reader task is scheduled, after the event loop has run every other
task; with many streams that delay is client error. Here the timestamp is the first thing `data_received`
does, and response bodies are parsed only after the pass.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import cast

MAX_HEAD_BYTES = 1 << 16


class NotHttp(Exception):
    """The peer does not speak HTTP/1.1."""


class Response:
    """One response as it arrives. `chunks` are (time of the read, body bytes of that read)."""

    __slots__ = (
        "_left",
        "_mode",
        "_rest",
        "_size",
        "chunks",
        "headers",
        "is_http_1_0",
        "is_whole",
        "status",
    )

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
        """Bytes of the body so far."""
        return sum(len(data) for _, data in self.chunks)

    def feed(self, now: float, data: bytes) -> None:
        """Parse the data of one read.

        Raises:
            NotHttp: the data is not an HTTP/1.1 response.
        """
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
        found, at = [], 0
        while at < len(data):
            if not self._size:
                taken = min(self._left, len(data) - at)
                # The last two bytes are the CRLF.
                found.append(data[at : at + min(taken, max(self._left - 2, 0))])
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
        return b"".join(found)


class Connection(asyncio.Protocol):
    """A keep-alive connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_open = False
        self.idle_since = 0.0

    @classmethod
    async def open(
        cls, host: str, port: int, context: ssl.SSLContext | None, timeout: float
    ) -> Connection:
        """Connect, with the TLS handshake where there is a context.

        Raises:
            OSError: the connection or the TLS handshake failed (TimeoutError included).
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            _, connection = await loop.create_connection(cls, host, port, ssl=context)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    async def exchange(self, message: bytes, response: Response) -> float:
        """Send a request and wait until `response` is whole; returns when it was sent.

        Raises:
            NotHttp: the response is not HTTP.
            ConnectionError: the peer closed before the end. `response` holds the data received until then.
        """
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
        except NotHttp as error:
            self._end(error)
            return
        if response.is_whole:
            self._end(None)

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
