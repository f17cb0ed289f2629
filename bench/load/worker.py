"""Load worker process: one event loop that sends on schedule, timestamps reads, and parses afterwards.

Pickles over stdin and stdout (`fleet.Fleet`): a `Job` in, `"ready"` out, the clock's origin in, `"ended"` out
per request, a `Report` out. `"stop"` in ends the pass early; end of input the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import re
import signal
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any, BinaryIO

from .exchange import (
    MARK,
    Answer,
    Connection,
    EncodedRequest,
    Endpoint,
    Exchange,
    NotHttp,
    Report,
    Response,
    WorkerJob,
    encoded_message,
    tls_context,
    turn_due,
)
from .stream import read_document, read_pooled, read_stream, refusal

OPENING_AT_ONCE = 16
"""Connections opened together: a server whose backlog is full drops some for a second."""
IDLE_SECONDS = 1.0
"""Seconds until idle connections close: servers with a thread each would let others wait."""
LAG_EVERY_SECONDS = 0.02
# Resolution of the event loop's timers: epoll counts whole milliseconds and rounds up.
TIMER_SECONDS = 0.001
BURDEN_EVERY_SECONDS = 0.05
COMPRESSIONS = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")
FIRST_FIELD = re.compile(rb"(data|event|error|id|retry)?:")
"""First characters of a stream of server-sent events: a field's name, or a comment."""


class Pool:
    """Keep-alive connections to one endpoint. The connection that was used last is used first."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._context = tls_context(endpoint.verify_tls) if endpoint.is_tls else None
        self.idle: deque[Connection] = deque()
        self.num_opened = 0

    async def fill(self, count: int) -> None:
        """Open `count` connections ahead of time; failures surface in the requests that need them."""
        for begin in range(0, count, OPENING_AT_ONCE):
            wave = min(OPENING_AT_ONCE, count - begin)
            opening = [self._open() for _ in range(wave)]
            opened = await asyncio.gather(*opening, return_exceptions=True)
            self.idle += [c for c in opened if isinstance(c, Connection)]
            if any(isinstance(c, BaseException) for c in opened):
                return

    async def take(self) -> tuple[Connection, bool]:
        """(connection, whether it was opened before)."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open:
                return connection, True
        return await self._open(), False

    def give_back(self, connection: Connection) -> None:
        if connection.is_open:
            connection.idle_since = time.perf_counter()
            self.idle.append(connection)

    def close_idle(self) -> None:
        before = time.perf_counter() - IDLE_SECONDS
        while self.idle and self.idle[0].idle_since < before:
            self.idle.popleft().close()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()

    async def _open(self) -> Connection:
        self.num_opened += 1
        loop, (host, port) = asyncio.get_running_loop(), (self._endpoint.host, self._endpoint.port)
        async with asyncio.timeout(min(self._endpoint.timeout, 30.0)):
            _, connection = await loop.create_connection(Connection, host, port, ssl=self._context)
        return connection


def openings(job: WorkerJob) -> Iterator[tuple[int, EncodedRequest, float]]:
    """(cycle, request, seconds from the origin): the requests once, or again and again in a window."""
    period = job.window.period if job.window else 0.0
    for cycle in count() if job.window else range(1):
        for request in job.requests:
            yield cycle, request, request.due + cycle * period


class SharedSemaphore:
    """Concurrency permits of all workers: a pipe with a byte per free one, like GNU make's jobserver."""

    def __init__(self, pipe: tuple[int, int]) -> None:
        self._read, self._write = pipe

    async def take(self) -> None:
        """Wait for a permit and take it; one waiter at a time."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                os.read(self._read, 1)
                return
            except BlockingIOError:
                readable = asyncio.Event()
                loop.add_reader(self._read, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._read)

    def give_back(self, _: object = None) -> None:
        os.write(self._write, b".")


class Pass:
    """One pass over the requests of a job."""

    def __init__(self, job: WorkerJob, pool: Pool, say: BinaryIO, stop: asyncio.Event) -> None:
        self._job = job
        self._pool = pool
        self._say = say
        self._stop = stop
        self._origin = 0.0
        self._ended: list[tuple[Exchange, Response]] = []
        self._branches: set[asyncio.Task[None]] = set()
        self._lags: list[float] = []

    async def run(self, origin: float) -> None:
        """Send every request when it is due and a permit is free; ends with the last response or `stop`."""
        self._origin = origin
        now = time.perf_counter()
        for connection in self._pool.idle:
            connection.idle_since = now
        semaphore = SharedSemaphore(self._job.permits) if self._job.permits else None
        tasks: set[asyncio.Task[None]] = set()
        helpers = [asyncio.create_task(self._watch_lag())]
        if self._job.burden:
            helpers.append(asyncio.create_task(self._waste()))
        stopped = asyncio.create_task(self._stop.wait())
        sender = asyncio.create_task(self._send_all(semaphore, tasks))
        await asyncio.wait({stopped, sender}, return_when=asyncio.FIRST_COMPLETED)
        while not self._stop.is_set() and (running := {*tasks, *self._branches}):
            whole = asyncio.gather(*running)
            await asyncio.wait({stopped, whole}, return_when=asyncio.FIRST_COMPLETED)
        left = [stopped, sender, *helpers, *tasks, *self._branches]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _send_all(
        self, semaphore: SharedSemaphore | None, tasks: set[asyncio.Task[None]]
    ) -> None:
        window, count = self._job.window, len(self._job.requests)
        left = window and max(0.0, self._origin + window.seconds - time.perf_counter())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                for cycle, request, due in openings(self._job):
                    await self._until(due)
                    first = self._ended[:count] if cycle else ()
                    if len(first) == count and all(
                        e.answer.error or r.status != 200 for e, r in first
                    ):
                        return  # the first requests all failed: there is no server to go on loading
                    if semaphore is not None:
                        await semaphore.take()
                    task = asyncio.create_task(self._converse(request, cycle, due))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    if semaphore is not None:
                        task.add_done_callback(semaphore.give_back)

    async def _converse(self, request: EncodedRequest, cycle: int, due: float) -> None:
        """Send a request, and where it opens a conversation every later turn, after its think time."""
        marks = self._job.marks
        mark = marks[cycle % len(marks)]
        opened, patience = due, [*[None] * len(request.turns), request.cancel]
        exchange = Exchange(request.request_id, 0.0, 0.0, due=due, cycle=cycle)
        response = await self._exchange(exchange, request.body.replace(MARK, mark), patience[0])
        self._branch(request, exchange, response)
        messages = request.messages.replace(MARK, mark, 1)
        for number, turn in enumerate(request.turns, start=1):
            # The history needs the answer now; it is parsed in the think time.
            answer = _read(response, self._job.endpoint)
            due = turn_due(turn.think, turn.since, opened, exchange.ended - self._origin)
            window = self._job.window
            if exchange.answer.error or answer.error or (window and due >= window.seconds):
                return
            reply = turn.answer or encoded_message("assistant", answer.content)
            messages = b",".join((messages, reply, turn.messages))
            await self._until(due)
            exchange = Exchange(request.request_id, 0.0, 0.0, due=due, turn=number, cycle=cycle)
            body = turn.head + messages + turn.tail
            response = await self._exchange(exchange, body, patience[number])
            self._branch(request, exchange, response)

    def _branch(self, request: EncodedRequest, exchange: Exchange, response: Response) -> None:
        """Begin the requests that wait for this turn, unless it failed."""
        failed = exchange.answer.error or response.status != 200
        if failed and not exchange.cancelled:
            return
        for turn, waiting in request.waiting:
            due = exchange.ended - self._origin + waiting.due
            window = self._job.window
            if turn != exchange.turn or (window and due >= window.seconds):
                continue
            task = asyncio.create_task(self._wait(waiting, exchange.cycle, due))
            self._branches.add(task)
            task.add_done_callback(self._branches.discard)

    async def _wait(self, request: EncodedRequest, cycle: int, due: float) -> None:
        await self._until(due)
        await self._converse(request, cycle, due)

    async def _until(self, due: float) -> None:
        while (wait := self._origin + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)

    async def _exchange(self, exchange: Exchange, body: bytes, patience: float | None) -> Response:
        """One exchange, with its times and any error; the client leaves after `patience` seconds."""
        response, error = Response(), ""
        head = self._job.endpoint.head + b"Content-Length: %d\r\n\r\n" % len(body)
        exchange.sent = time.perf_counter()
        timeout = self._job.endpoint.timeout
        exchange.cancelled = patience is not None and patience < timeout
        try:
            async with asyncio.timeout(patience if exchange.cancelled else timeout):
                exchange.sent = await self._send(head + body, response)
        except TimeoutError:
            size = response.num_bytes
            seen = (
                f"it stopped after {size:,} bytes"
                if response.is_head_whole
                else "no headers received"
            )
            error = f"no complete response within {timeout:g} s: {seen}"
        except NotHttp as fault:
            error = str(fault)
        except ssl.SSLError as fault:
            error = f"TLS: {fault.reason or fault}"
        except OSError as fault:
            error = _connection_error(fault, response)
        exchange.cancelled = exchange.cancelled and not response.is_whole
        exchange.ended, exchange.answer.error = time.perf_counter(), error
        self._ended.append((exchange, response))
        _tell(self._say, "ended")
        return response

    async def _send(self, message: bytes, response: Response) -> float:
        """Exchange on a connection of the pool, again if it was closed before a byte; when it was sent."""
        while True:
            connection, is_kept = await self._pool.take()
            try:
                return await connection.exchange(message, response)
            except ConnectionError:
                if not is_kept or response.has_begun:
                    raise
            finally:
                self._pool.give_back(connection)

    async def _watch_lag(self) -> None:
        while True:
            due = time.perf_counter() + LAG_EVERY_SECONDS
            await asyncio.sleep(LAG_EVERY_SECONDS)
            self._lags.append(max(0.0, time.perf_counter() - due - TIMER_SECONDS))
            self._pool.close_idle()

    async def _waste(self) -> None:
        while True:
            until = time.perf_counter() + self._job.burden
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(BURDEN_EVERY_SECONDS)

    def report(self, late_connections: int) -> Report:
        """Parse the responses, deferred until no request is in flight."""
        exchanges = []
        for exchange, response in self._ended:
            error, exchange.answer = exchange.answer.error, _read(response, self._job.endpoint)
            exchange.answer.error = error or exchange.answer.error
            exchanges.append(exchange)
        lags = sorted(lag * 1000 for lag in self._lags) or [0.0]
        p99 = lags[min(len(lags) - 1, int(len(lags) * 0.99))]
        lag_ms = {"mean": sum(lags) / len(lags), "p99": p99, "max": lags[-1]}
        return Report(exchanges, lag_ms, late_connections)


def _read(response: Response, endpoint: Endpoint) -> Answer:
    if not response.is_head_whole:
        return Answer()
    encoding = response.headers.get("content-encoding")
    if encoding in COMPRESSIONS:
        error = f"HTTP {response.status}: the body is compressed ({encoding}) against the request"
        return Answer(error=f"{error}; turn compression off in the server or proxy")
    if response.status != 200:
        return Answer(error=refusal(response.status, response.chunks))
    if endpoint.is_pooled:
        return read_pooled(response.chunks)
    # Servers may send white space before a document, and gateways a page of HTML.
    body = b"".join(data for _, data in response.chunks).lstrip()
    if body and not FIRST_FIELD.match(body):
        return read_document(response.chunks)
    return read_stream(response.chunks)


def _connection_error(error: OSError, response: Response) -> str:
    if response.is_head_whole:
        size = response.num_bytes
        return f"the connection ended within the response, stopped after {size:,} bytes"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError):
        return "the connection was closed before a response"
    return f"cannot connect: {error.strerror or error}"


def _tell(stream: BinaryIO, message: Any) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _listen(
    loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Any], stop: asyncio.Event
) -> None:
    """Reader thread: messages into the loop's queue; a stop takes effect at once."""
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except EOFError:
            message = None
        if message in ("stop", None):
            loop.call_soon_threadsafe(stop.set)
        if message != "stop":
            loop.call_soon_threadsafe(inbox.put_nowait, message)
        if message is None:
            return


async def serve_jobs(say: BinaryIO) -> None:
    """Process jobs until the input ends."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(loop, inbox, stop), daemon=True).start()
    while isinstance(job := await inbox.get(), WorkerJob):
        pool = Pool(job.endpoint)
        load_pass = Pass(job, pool, say, stop)
        await pool.fill(job.opened_ahead)
        opened = pool.num_opened
        gc.collect()
        gc.freeze()
        gc.disable()
        _tell(say, "ready")
        if (origin := await inbox.get()) is None:
            return
        await load_pass.run(origin)
        pool.close()
        gc.enable()
        gc.unfreeze()
        _tell(say, load_pass.report(pool.num_opened - opened))


def main() -> None:
    """Entry point of the process; Ctrl-C is handled by the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Redirect prints, which would corrupt the pickle stream.
    say = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(serve_jobs(say))


if __name__ == "__main__":
    main()
