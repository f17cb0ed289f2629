"""The load worker processes of a run, which share a concurrency limit, and the certification of their error.

The error is measured against `known_server`, which reports when it read the request and when it wrote, on the
client's clock: this separates the client's error from the server's lateness.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ...base.progress import Progress, Silent
from ..machine.environment import describe
from ..machine.pass_usage import process_cpu_seconds
from .exchange import EncodedRequest, Endpoint, Exchange, PassWindow, Report, WorkerJob
from .known_server import known_server
from .load import PassProgress

PIPE_BYTES = 1 << 16  # capacity of a pipe on Linux
START_SECONDS = 0.05  # from all workers ready to the first request
STREAMS_PER_WORKER = 64
AT_START_SECONDS = 0.02
MAX_OPENED_AHEAD = 1024
WAKE_SECONDS = 0.2  # polling interval for an interrupt


def default_workers(streams: int) -> int:
    return max(1, min(-(-streams // STREAMS_PER_WORKER), (os.cpu_count() or 2) // 2))


@dataclass(slots=True)
class FleetPass:
    """One pass, merged over all workers. Times are `time.perf_counter()`."""

    origin: float
    ended: float
    exchanges: list[Exchange]
    lag_ms: dict[str, float]
    late_connections: int
    interrupted: bool = False


class Fleet:
    """`num_workers` load processes for all passes of the context; RuntimeError when a worker died."""

    def __init__(self, num_workers: int) -> None:
        self._inbox: queue.Queue[Any] = queue.Queue()
        # The concurrency permits: a byte per free permit; all workers take from it and give back.
        self._places = os.pipe()
        self._open_ends = list(self._places)
        os.set_blocking(self._places[0], False)
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the parent alone
                pass_fds=self._places,
            )
            for _ in range(num_workers)
        ]
        for worker in self._workers:
            threading.Thread(target=self._listen, args=(worker,), daemon=True).start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        while self._open_ends:
            os.close(self._open_ends.pop())

    def run(
        self,
        endpoint: Endpoint,
        requests: Sequence[EncodedRequest],
        limit: int | None,
        *,
        marks: Sequence[bytes] = (b"",),
        window: PassWindow | None = None,
        burden: float = 0.0,
        progress: Progress | None = None,
        description: str = "bench",
    ) -> FleetPass:
        """Send `requests`, in the order in which they are due, split round-robin over the workers. A
        concurrency limit holds over all workers together. An interrupt ends the pass; finished requests are
        kept. With a `window` every worker repeats its requests until it closes."""
        # Without a window, a limit above the number of requests is none; a pipe has a finite capacity.
        limited = limit is not None and (limit < len(requests) or window is not None)
        permits = self._places if limited else None
        job = WorkerJob(endpoint, (), limit, burden, permits, tuple(marks), window)
        count = self._hand_out(job, requests)
        total = sum(request.num_requests for request in requests)
        shown = PassProgress(
            progress or Silent(), description, total, window.seconds if window else None
        )
        origin, stopped, reports = self._collect(count, shown)
        shown.finish()
        exchanges = [exchange for report in reports for exchange in report.exchanges]
        # Without an interrupt a pass ends with its last request, as in vLLM.
        last = max((exchange.ended for exchange in exchanges), default=time.perf_counter())
        return FleetPass(
            origin,
            last if stopped is None else stopped,
            exchanges,
            {key: max(report.lag_ms[key] for report in reports) for key in ("mean", "p99", "max")},
            sum(report.late_connections for report in reports),
            interrupted=stopped is not None,
        )

    def _hand_out(self, job: WorkerJob, requests: Sequence[EncodedRequest]) -> int:
        """Distribute the requests over the workers; returns how many workers got some."""
        count = min(len(self._workers), len(requests), job.limit or len(requests))
        if job.permits is not None and job.limit is not None:
            # Exactly the limit's permits are free; none is held between passes.
            with contextlib.suppress(BlockingIOError):
                while os.read(self._places[0], PIPE_BYTES):
                    pass
            os.write(self._places[1], b"." * min(job.limit, PIPE_BYTES))
        ordered = sorted(requests, key=lambda request: request.due)
        # Only the requests due at once find a connection; more of them would occupy threads of the server.
        at_start = sum(request.due <= AT_START_SECONDS for request in requests)
        opened = min(at_start, job.limit or at_start, MAX_OPENED_AHEAD)
        for number in range(count):
            share = len(range(number, opened, count))
            own = replace(job, requests=tuple(ordered[number::count]), opened_ahead=share)
            self._send([number], own)
        return count

    def _collect(self, count: int, shown: PassProgress) -> tuple[float, float | None, list[Report]]:
        """Start the clock when `count` workers are ready; origin, time of an interrupt or None, reports."""
        reports: list[Report] = []
        ready, origin, stopped = 0, time.perf_counter(), None
        while len(reports) < count:
            try:
                message = self._inbox.get(timeout=WAKE_SECONDS)
                if message == "ready":
                    ready += 1
                    if ready == count:
                        origin = time.perf_counter() + START_SECONDS
                        self._send(range(count), origin)
                elif message == "ended":
                    shown.request_ended(time.perf_counter() - origin)
                elif isinstance(message, Report):
                    reports.append(message)
                else:
                    raise RuntimeError("a load worker died; its output is above")
            except queue.Empty:
                continue
            except KeyboardInterrupt:
                if stopped is None:
                    stopped = time.perf_counter()
                    if ready < count:
                        self._send(range(count), origin)
                    self._send(range(count), "stop")
        return origin, stopped, reports

    def cpu_seconds(self) -> float:
        return sum(process_cpu_seconds(worker.pid) or 0.0 for worker in self._workers)

    def _send(self, numbers: Iterable[int], message: Any) -> None:
        for number in numbers:
            stream = self._workers[number].stdin
            assert stream is not None
            pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
            stream.flush()

    def _listen(self, worker: subprocess.Popen[bytes]) -> None:
        """Reader thread, one per worker: queues its messages, and None when it has exited."""
        assert worker.stdout is not None
        while True:
            try:
                message = pickle.load(worker.stdout)
            except (EOFError, pickle.UnpicklingError):
                self._inbox.put(None)
                return
            self._inbox.put(message)


TTFT_MS, ITL_MS = 50.0, 10.0
TOKENS = 40  # a stream of 50 + 39 × 10 ms
EVENTS_PER_SECOND = 6400
"""Most that the server writes on one core; more streams get theirs more slowly, and shorter ones."""
ROUNDS = 3
CHECKED_STREAMS = (1, 16, 100, 500, 1000)
MAX_SHARE = 0.05

FORMULAS = {
    "client_ttft_error_ms": "per request to the server of known latency: (first read − sent) in the client "
    "− (first write − request read) in the server",
    "client_itl_error_ms": "per gap: |gap between reads in the client − gap between writes in the server|",
    "loop_lag_ms": "wake-up of the client's event loop after the requested time, beyond its timer's 1 ms",
    "certified": f"median TTFT error and mean loop lag ≤ {MAX_SHARE:.0%} of the median TTFT, median ITL "
    f"error ≤ {MAX_SHARE:.0%} of the median ITL, and in an open loop without a concurrency limit the "
    f"median lateness of sending ≤ {MAX_SHARE:.0%} of the median end-to-end latency",
}


@dataclass(frozen=True, slots=True)
class ClientError:
    """The client's error at a number of streams, ms; `server_lateness_ms` is overload of the machine."""

    streams: int
    workers: int
    requests: int
    failed: int
    client_ttft_error_ms: dict[str, float]
    client_itl_error_ms: dict[str, float]
    server_lateness_ms: dict[str, float]
    loop_lag_ms: dict[str, float]


def measure_client(
    fleet: Fleet,
    num_workers: int,
    streams: int,
    *,
    burden: float = 0.0,
    progress: Progress | None = None,
) -> ClientError:
    itl_ms = timetable(streams)[0]
    with known_server(TTFT_MS, itl_ms) as port:
        sent = known_pass(fleet, port, streams, itl_ms, burden=burden, progress=progress)
    return client_error(sent, streams, num_workers)


def timetable(streams: int) -> tuple[float, int]:
    """(ITL in milliseconds, tokens of a stream) of the known-latency server under so many streams."""
    itl = max(ITL_MS, 1000 * streams / EVENTS_PER_SECOND)
    return itl, max(5, round(TOKENS * ITL_MS / itl))


def known_pass(
    fleet: Fleet,
    port: int,
    streams: int,
    itl_ms: float,
    *,
    burden: float = 0.0,
    progress: Progress | None = None,
) -> FleetPass:
    """Send `streams` concurrent streams, evenly begun, to a known-latency server, or a proxy before it."""
    tokens = timetable(streams)[1]
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    every = (TTFT_MS + (tokens - 1) * itl_ms) / 1000 / streams
    requests = [
        EncodedRequest(f"known-{number}", body, number * every)
        for number in range(streams * ROUNDS)
    ]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    fleet_pass = fleet.run(
        Endpoint("127.0.0.1", port, head, timeout=60.0),
        requests,
        streams,
        burden=burden,
        progress=progress,
        description=f"client check, {streams} streams",
    )
    if fleet_pass.interrupted:
        raise KeyboardInterrupt
    return fleet_pass


def check_client(
    num_workers: int | None = None,
    *,
    streams: Sequence[int] = CHECKED_STREAMS,
    burden: float = 0.0,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[ClientError]]:
    """The client's error at several numbers of streams: (record, errors)."""
    errors = []
    for count in streams:
        workers = num_workers or default_workers(count)
        with Fleet(workers) as fleet:
            error = measure_client(fleet, workers, count, burden=burden, progress=progress)
        errors.append(error)
    environment = describe("cpu")
    wanted = ("machine", "load_average", "system", "python", "command", "commit")
    record = {
        "server": {
            "ttft_ms": TTFT_MS,
            "itl_ms_and_tokens": {str(count): timetable(count) for count in streams},
        },
        "formulas": {key: FORMULAS[key] for key in FORMULAS if key != "certified"},
        "client_burden_ms": burden * 1000,
        "environment": {key: environment[key] for key in wanted},
        "errors": [asdict(error) for error in errors],
    }
    return record, errors


def client_error(fleet_pass: FleetPass, streams: int, num_workers: int) -> ClientError:
    """The client's errors in one pass against the known-latency server."""
    done = [exchange for exchange in fleet_pass.exchanges if not exchange.answer.error]
    first, gaps, late = [], [], []
    for exchange in done:
        times, (received, *written) = exchange.answer.times, exchange.answer.server_times
        first.append((times[0] - exchange.sent) - (written[0] - received))
        late.append(written[0] - received - TTFT_MS / 1000)
        gaps += [
            abs((b - a) - (d - c))
            for (a, b), (c, d) in zip(pairwise(times), pairwise(written), strict=True)
        ]
    return ClientError(
        streams,
        num_workers,
        len(fleet_pass.exchanges),
        len(fleet_pass.exchanges) - len(done),
        _summary(first),
        _summary(gaps),
        _summary(late),
        fleet_pass.lag_ms,
    )


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0]) * 1000
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def judge(
    error: ClientError | None,
    metrics: Mapping[str, Mapping[str, Any]],
    *,
    loop_lag_ms: float,
    send_lag_ms: float | None,
) -> list[str]:
    """Reasons against certifying a run; `send_lag_ms`, the median, is None under a concurrency limit."""
    # A pooling response has no first token: its end is its only time.
    first = "ttft" if metrics["ttft"]["median"] is not None else "e2el"
    if metrics[first]["median"] is None:
        return ["no request succeeded, so there is nothing to certify"]
    if error is None:
        return ["the client was not checked (--no-check-client)"]
    if error.failed:
        return [f"{error.failed} of {error.requests} requests to the known-latency server failed"]
    reasons = []
    for name, error_ms, metric in (
        ("TTFT error", error.client_ttft_error_ms["median"], first),
        ("ITL error", error.client_itl_error_ms["median"], "itl"),
        ("event loop lag", loop_lag_ms, first),
        ("lateness of sending", send_lag_ms, "e2el"),
    ):
        measured = metrics[metric]["median"]
        if error_ms is not None and measured and error_ms > MAX_SHARE * measured:
            reasons.append(
                f"the client's {name} is {error_ms:.2f} ms, {error_ms / measured:.0%} of the median "
                f"{metric.upper()} of {measured:.2f} ms (limit {MAX_SHARE:.0%})"
            )
    return reasons
