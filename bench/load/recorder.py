"""Recording proxy: passes requests and streams through, byte for byte, and hands them to the trace's writer.

aiohttp carries the bytes; nothing is parsed on their way.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from ...quant.base.errors import BadInput
from ...quant.base.extras import require
from ..machine.pass_usage import process_cpu_seconds
from .trace_writer import Passed, TraceWriter

if TYPE_CHECKING:
    from aiohttp import ClientResponse, web

# Of one connection each (RFC 9110, 7.6.1); aiohttp writes its own.
HOP_BY_HOP = {
    "connection",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
MAX_BODY_BYTES = 1 << 30
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 3.0
"""A connection to the upstream is not used again after this: common servers close it after 5 s."""
PROBE_SECONDS = 30
"""Idle connections are probed, so that a peer that vanished without a word is noticed."""


class Proxy:
    """Passes requests to the upstream, and hands each to the writer when it has ended."""

    def __init__(self, upstream: str, writer: TraceWriter, say: Callable[[str], None]) -> None:
        self._upstream, self._writer, self._say = upstream.rstrip("/"), writer, say
        self._is_stopping = False
        # Arrivals and durations are of one clock: a request has ended before the next one arrives.
        self._epoch = time.time() - time.perf_counter()

    async def serve(self, host: str, port: int) -> None:
        """Serve until SIGINT or SIGTERM; a port of 0 is a free one.

        Raises:
            BadInput: the address cannot be listened on.
        """
        import aiohttp
        from aiohttp import web

        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_probed_socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, backlog=1024)
            await site.start()
            where = runner.addresses[0]
            self._say(f"recording http://{where[0]}:{where[1]} -> {self._upstream}, until Ctrl-C")
            await stop.wait()
        except OSError as error:
            raise BadInput(f"cannot listen on {host}:{port}: {error.strerror}") from error
        finally:
            self._is_stopping = True
            await runner.cleanup()
            await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """One request to the upstream, and its answer back, chunk by chunk as they come."""
        import aiohttp
        from aiohttp import web

        began = time.perf_counter()
        arrival = self._epoch + began
        key = request.headers.get("Authorization") or request.headers.get("x-api-key")
        passed = Passed(
            arrival, request.path, key or str(request.remote), request.headers, await request.read()
        )
        response = None
        try:
            async with self._sent(request, passed.body) as answer:
                passed.status = answer.status
                passed.encoding = answer.headers.get("Content-Encoding", "").lower()
                response = _begun(answer)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    if passed.first is None:
                        passed.first = round(time.perf_counter() - began, 6)
                    await response.write(chunk)
                    passed.chunks.append(chunk)
                await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            passed.ended = "stopped" if self._is_stopping else "cancelled"
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            passed.ended = "upstream"
            reason = f"{self._upstream}: {error or type(error).__name__}"
            self._say(f"{request.method} {request.path}: {reason}")
            if (
                response is not None
            ):  # the client sees what the upstream did: an end within the answer
                if request.transport is not None:
                    request.transport.abort()
                return response
            passed.status = 502
            return web.json_response(
                {"error": {"message": f"llmopt record: {reason}", "type": "bad_gateway"}},
                status=502,
            )
        finally:
            passed.seconds = time.perf_counter() - began
            if request.method == "POST":
                self._writer.add(passed)
        return response

    def _sent(self, request: web.Request, body: bytes) -> Any:
        from yarl import URL

        headers = [pair for pair in request.headers.items() if pair[0].lower() not in HOP_BY_HOP]
        return self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )


def _begun(answer: ClientResponse) -> web.StreamResponse:
    """The response to the client, with the status and headers of the upstream's."""
    from aiohttp import web

    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in HOP_BY_HOP:
            response.headers.add(name, value)
    return response


def _probed_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose peer is probed when it is silent."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    return made


def record(
    upstream: str,
    output: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    salt: str | None = None,
    keep_text: bool = False,
    say: Callable[[str], None],
) -> dict[str, int]:
    """Record what passes to the `upstream` into a trace, until it is interrupted; returns the totals.

    Args:
        salt: of the hashes; None is one that nobody knows. Recorders with the same one name a block alike.
        keep_text: write prompts and answers too.

    Raises:
        BadInput: no HTTP URL, an address or a file that cannot be used, or aiohttp is not installed.
    """
    parts = urlsplit(upstream)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"--upstream {upstream}: give a URL such as http://localhost:8000")
    require("llmopt record", "record", "aiohttp")
    # The thread that parses must not hold the streams up.
    sys.setswitchinterval(0.0005)
    secret = salt.encode() if salt else secrets.token_bytes(32)
    writer = TraceWriter(output, salt=secret, keep_text=keep_text)
    try:
        asyncio.run(Proxy(upstream, writer, say).serve(host, port))
    finally:
        writer.close()
    return dict(writer.totals)


CHECKED_STREAMS, CHECKED_ITL_MS = 100, 40.0


def added_latency() -> dict[str, Any]:
    """Measure what the proxy adds to the way of a chunk at `CHECKED_STREAMS` streams, in milliseconds: from
    its write in a server of known latency to its read in a client, through a recorder less without one."""
    from .certify import TTFT_MS, known_pass
    from .fleet import Fleet
    from .known_server import known_server

    def latencies(port: int) -> np.ndarray:
        answers = [
            one.answer for one in known_pass(fleet, port, CHECKED_STREAMS, CHECKED_ITL_MS).exchanges
        ]
        pairs = [
            pair for one in answers for pair in zip(one.times, one.server_times[1:], strict=True)
        ]
        return np.array([1000 * (read - written) for read, written in pairs])

    with (
        TemporaryDirectory() as folder,
        known_server(TTFT_MS, CHECKED_ITL_MS) as port,
        Fleet(1) as fleet,
        subprocess.Popen(
            [sys.executable, "-m", __name__, f"http://127.0.0.1:{port}", f"{folder}/trace.jsonl"],
            stdout=subprocess.PIPE,
            text=True,
        ) as proxy,
    ):
        assert proxy.stdout is not None
        try:
            through = int(proxy.stdout.readline().partition(" ->")[0].rpartition(":")[2])
            plain, before = latencies(port), process_cpu_seconds(proxy.pid) or 0.0
            proxied = latencies(through)
            spent = (process_cpu_seconds(proxy.pid) or 0.0) - before
        finally:
            proxy.terminate()
    parts = {"direct": plain, "through": proxied}
    found = {
        name: {"median": float(np.median(part)), "p99": float(np.percentile(part, 99))}
        for name, part in parts.items()
    }
    added = {key: found["through"][key] - found["direct"][key] for key in ("median", "p99")}
    cost = {"chunks": len(proxied), "cpu_us_per_chunk": 1e6 * spent / len(proxied)}
    return {"streams": CHECKED_STREAMS, "itl_ms": CHECKED_ITL_MS, **cost, **found, "added": added}


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]), say=lambda line: print(line, flush=True))
