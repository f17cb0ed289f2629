"""Server process: listening socket, uvicorn, signals and drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, Timer
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ...base.errors import BadInput, Failure
from ..base.host import use_one_arena
from .protocol.errors import error_body
from .protocol.server_options import ServerOptions, TlsOptions
from .requests.connection import bounded_connections
from .requests.observe import configure_logging

_log = logging.getLogger(__name__)


SWITCH_SECONDS = 5e-4
"""Time after which a thread gives Python's lock to one that waits for it.

The event loop waits for it after every system call. With Python's own 5 ms, next to threads that compute, a
thousand connections or writes would take seconds.
"""

BACKLOG, ACCEPTED_AT_A_TIME = 2048, 32
"""Connections that wait in the kernel, and those that one turn of the event loop accepts: asyncio takes as
many at once as wait, and a thousand held up every other connection for half a second."""

KERNEL_CACHE_CAPACITY = 128
"""Capacity of oneDNN's and torch's primitive caches: one compiled kernel per GEMM shape."""


def bound_memory() -> None:
    """Bound what a server keeps: oneDNN's primitive caches on a CPU, and the heaps of the C allocator. Must
    be called before torch is imported and threads are started. Batch sizes vary from step to step, and each
    new GEMM shape compiles a kernel of about half a MiB. By default oneDNN and torch each cache a thousand of
    them."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNEL_CACHE_CAPACITY))
    use_one_arena()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port`; port 0 takes a free one. Connections are refused until it listens.
    Raises `BadInput`: the port is in use, or the address is not one of this machine's."""
    try:
        how: dict[str, Any] = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, **how)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise _cannot_listen(host, port, error) from error
    try:
        # Without the option, connections of an earlier server in TIME_WAIT hold the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def own_names(host: str) -> frozenset[str]:
    names = {socket.gethostname(), socket.getfqdn(), host}
    return frozenset(name.lower() for name in names if name)


def _cannot_listen(host: str, port: int, error: Exception) -> BadInput:
    reason = (isinstance(error, OSError) and error.strerror) or error
    return BadInput(
        f"cannot listen on {host}, port {port}: {reason}; choose another --port, 0 for a free one"
    )


def base_url(listener: socket.socket, tls: TlsOptions | None = None) -> str:
    """Base URL of a bound socket, for clients on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _listen(listener: socket.socket) -> None:
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


@contextlib.contextmanager
def answering_while_loading(listener: socket.socket, tls: TlsOptions | None) -> Iterator[None]:
    """Answer every request with 503 and `Retry-After`, as llama.cpp's server does, until the model is loaded.
    Under TLS, whose handshakes are the server's, connections are refused until then. Raises `BadInput`:
    another process has begun to listen on the port since `bind`."""
    if tls is not None:
        yield
        return
    _listen(listener)
    server = ThreadingHTTPServer(listener.getsockname()[:2], _Loading, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    answers = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    answers.start()
    try:
        yield
    finally:
        server.shutdown()
        answers.join()


class _Loading(BaseHTTPRequestHandler):
    timeout = 5
    """Seconds that a connection has for its request."""

    def do_GET(self) -> None:
        length = self.headers.get("Content-Length", "0")
        # What is not read of a body resets the connection before the answer is there.
        self.rfile.read(min(int(length) if length.isdecimal() else 0, 2**20))
        body = json.dumps(error_body(503, "the model is loading", code="loading_model")).encode()
        self.send_response(503)
        self.send_header("Retry-After", "1")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_OPTIONS = do_PUT = do_PATCH = do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: it is a server's first seconds."""


EXIT_SECONDS = 5.0
"""Time after the drain in which threads must end. It is enough for those that are not stuck in one call."""


def end_within(seconds: float) -> Timer:
    """End the process with 0 after so many seconds, unless it is cancelled: a thread that works on a request
    without end would keep the process."""

    def end() -> None:
        _log.warning("work of a request has not ended: the server ends without it")
        os._exit(0)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def serve(app: FastAPI, listener: socket.socket, *, on_ready: Callable[[], None]) -> Timer:
    """Serve `app` until SIGINT or SIGTERM, then drain the requests in flight. Returns the timer of
    `end_within`, which the signal started, because threads may still work for a request.

    `on_ready` is called once the engine is warm. With a shutdown delay, requests are still taken for that
    long after the signal, while `/ready` is 503. Requests that outlast the drain end with an error. A second
    signal ends delay and drain at once. Raises `BadInput`: another process has begun to listen on the port
    since `bind`; `Failure`: the engine failed, so that a supervisor should start the server again.
    """
    _listen(listener)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, on_ready)
    server.run(sockets=[listener])
    app.state.loop.stop()  # a third SIGINT skips the lifespan's shutdown
    if server.engine_failure is not None:
        server.last_resort.cancel()
        raise Failure(server.engine_failure)
    return server.last_resort


class Server(uvicorn.Server):
    """uvicorn server with graceful drain; signals stop it without being re-raised."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None]) -> None:
        self._options: ServerOptions = app.state.options
        options = self._options
        configure_logging(options.log_format)
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                ws="none",
                http=bounded_connections(options),
                backlog=ACCEPTED_AT_A_TIME,
                lifespan="on",
                log_config=None,
                access_log=False,  # the application has its own access line
                server_header=False,
                timeout_keep_alive=75,  # longer than the pools of common clients keep a connection
                timeout_graceful_shutdown=int(options.drain_seconds) + 2,
                **({} if options.tls is None else options.tls.for_uvicorn()),
            )
        )
        self.engine_failure: str | None = None
        self.last_resort = Timer(0, lambda: None)
        self._app = app
        self._on_ready = on_ready
        self._hurried = asyncio.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # which asyncio has lowered to what it accepts at a time
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Say that the server is ready, and stop it once the engine cannot go on."""
        loop = self._app.state.loop
        await loop.is_warm.wait()
        if loop.is_ready:
            # What a server loads stays: a full collection, which every thread waits for, need not look at it.
            gc.collect()
            gc.freeze()
            self._on_ready()
        await loop.has_failed.wait()
        if not self.should_exit:
            self.engine_failure = loop.unavailable
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.loop.is_draining = True
        if self._app.state.loop.unavailable is None:
            await self._delay()
        seconds = self._options.drain_seconds
        deadline = asyncio.get_running_loop().call_later(seconds, self._end_streams)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    async def _delay(self) -> None:
        """Take requests until the balancers have seen `/ready`, each on its last connection."""
        headers = self.server_state.default_headers  # which responses that have begun keep
        self.server_state.default_headers = [*headers, (b"connection", b"close")]
        events = self._hurried, self._app.state.loop.has_failed
        reasons = [asyncio.ensure_future(event.wait()) for event in events]
        seconds = self._options.shutdown_delay_seconds
        await asyncio.wait(reasons, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for reason in reasons:
            reason.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends the drain, a third SIGINT forces the exit."""
        options = self._options
        is_second = self.should_exit and self._app.state.loop.unavailable is None
        if is_second and self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._end_streams)
        else:
            if not self.should_exit:
                graceful = options.shutdown_delay_seconds + options.drain_seconds
                self.last_resort = end_within(graceful + EXIT_SECONDS)
            super().handle_exit(sig, frame)

    def _end_streams(self) -> None:
        self._hurried.set()
        self._app.state.loop.fail("the server is stopping")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals without re-raising them after shutdown, unlike uvicorn's `capture_signals`."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before: dict[int, Any] = {n: signal.signal(n, self.handle_exit) for n in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
