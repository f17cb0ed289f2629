"""HTTP/1.1 connections with limits on their number, on the time of a request's head, and on idle readers."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..protocol.server_options import ServerOptions

_CLOSING = b"Connection: close\r\nContent-Length: 0\r\n\r\n"
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n" + _CLOSING
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSING


def bounded_connections(options: ServerOptions) -> type[H11Protocol]:
    """uvicorn's protocol class with the limits of `options`."""
    return type("BoundedConnection", (_BoundedConnection,), {"options": options})


class _BoundedConnection(H11Protocol):
    """A connection that is closed where a request's head is not complete in time, or where its client takes
    nothing of a response for too long: both would stay open for good. A connection beyond the limit gets 503
    at once."""

    options: ServerOptions
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # So that `pause_writing` is called for unsent bytes. A limit of 0 would stop a TLS transport for
        # good: it pauses at the limit, and not only above it.
        transport.set_write_buffer_limits(high=1, low=0)
        if len(self.connections) > self.options.max_connections:
            transport.write(REFUSED)
            transport.close()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _await_head(self) -> None:
        """Start the clock, unless it runs: more bytes of the same head give no more time."""
        if self._head_timer is None:
            seconds = self.options.header_timeout_seconds
            self._head_timer = self.loop.call_later(seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(TIMED_OUT)
            self.transport.close()

    def _await_reader(self) -> None:
        """Abort the connection unless the client takes a byte in time; `close` would wait for it for good."""
        num_unsent = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < num_unsent:
                self._await_reader()
            else:
                self.transport.abort()

        self._stop_send_timer()
        self._send_timer = self.loop.call_later(self.options.send_timeout_seconds, look)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
