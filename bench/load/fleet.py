"""The load worker processes of a run: a shared concurrency limit, and passes split over all workers."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.progress import Progress, Silent
from ..machine.pass_usage import process_cpu_seconds
from .exchange import EncodedRequest, Endpoint, Exchange, PassWindow, Report, WorkerJob
from .load import PassProgress

PIPE_BYTES = 1 << 16  # capacity of a pipe on Linux
START_SECONDS = 0.05  # from all workers ready to the first request
STREAMS_PER_WORKER = 64
AT_START_SECONDS = 0.02
MAX_OPENED_AHEAD = 1024
WAKE_SECONDS = 0.2  # polling interval for an interrupt


def default_workers(streams: int) -> int:
    """One worker per 64 streams, at most half of the cores."""
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
    """`num_workers` load processes that persist across passes. A context manager: leaving ends them.

    Raises:
        RuntimeError: from a pass, when a worker died.
    """

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
        """Send `requests`, in the order in which they are due, split round-robin over the workers.

        A concurrency limit holds over all workers together. An interrupt ends the pass; finished requests
        are kept. With a `window` every worker repeats its requests until it closes.
        """
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
            self._set_places(min(job.limit, PIPE_BYTES))
        ordered = sorted(requests, key=lambda request: request.due)
        # Only the requests due at once find a connection; more of them would occupy threads of the server.
        at_start = sum(request.due <= AT_START_SECONDS for request in requests)
        opened = min(at_start, job.limit or at_start, MAX_OPENED_AHEAD)
        for number in range(count):
            share = len(range(number, opened, count))
            self._send(
                number, replace(job, requests=tuple(ordered[number::count]), opened_ahead=share)
            )
        return count

    def _collect(self, count: int, shown: PassProgress) -> tuple[float, float | None, list[Report]]:
        """Start the clock when all `count` workers are ready, and wait for their reports.

        Returns the origin of the clock, the time of an interrupt (None without one), and the reports.
        """
        reports: list[Report] = []
        ready, origin, stopped = 0, time.perf_counter(), None
        while len(reports) < count:
            try:
                message = self._inbox.get(timeout=WAKE_SECONDS)
                if message == "ready":
                    ready += 1
                    if ready == count:
                        origin = time.perf_counter() + START_SECONDS
                        self._send_all(count, origin)
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
                        self._send_all(count, origin)
                    self._send_all(count, "stop")
        return origin, stopped, reports

    def cpu_seconds(self) -> float:
        """CPU time of the workers; 0 where the system does not report it."""
        return sum(process_cpu_seconds(worker.pid) or 0.0 for worker in self._workers)

    def _set_places(self, count: int) -> None:
        """Reset to exactly `count` free permits; none is held between passes."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._places[0], PIPE_BYTES):
                pass
        os.write(self._places[1], b"." * count)

    def _send_all(self, count: int, message: Any) -> None:
        for number in range(count):
            self._send(number, message)

    def _send(self, number: int, message: Any) -> None:
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
