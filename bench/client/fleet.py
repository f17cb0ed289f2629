"""The worker processes of a run, and passes over a workload with all of them."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...quant.progress import Progress, Silent
from .job import Endpoint, Exchange, Job, Report, Shot

START_SECONDS = 0.05  # from the last worker's readiness to the first request
STREAMS_PER_WORKER = 64
WAKE_SECONDS = 0.2  # how long an interrupt may go unheard


def default_workers(streams: int) -> int:
    """One worker for 64 streams, but half of the cores stay free for everything else."""
    return max(1, min(-(-streams // STREAMS_PER_WORKER), (os.cpu_count() or 2) // 2))


@dataclass(slots=True)
class FleetPass:
    """A pass as all workers saw it. Times are `time.perf_counter()`."""

    origin: float
    ended: float
    exchanges: list[Exchange]
    lag_ms: dict[str, float]
    late_connections: int
    interrupted: bool = False


class Fleet:
    """`num_workers` load processes that live from pass to pass. A context manager: leaving ends them.

    Raises:
        RuntimeError: from a pass, when a worker died.
    """

    def __init__(self, num_workers: int) -> None:
        self._inbox: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the parent alone
            )
            for _ in range(num_workers)
        ]
        for number, worker in enumerate(self._workers):
            threading.Thread(target=self._listen, args=(number, worker), daemon=True).start()

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

    def run(
        self,
        endpoint: Endpoint,
        shots: Sequence[Shot],
        limit: int | None,
        *,
        burden: float = 0.0,
        progress: Progress | None = None,
        description: str = "bench",
    ) -> FleetPass:
        """Send `shots`, in the order in which they are due, split over the workers in turn.

        A concurrency limit is split too: each worker keeps its share. An interrupt ends the pass; what
        was answered stays.
        """
        progress = progress or Silent()
        count = min(len(self._workers), len(shots), limit or len(shots))
        limits = [
            None if limit is None else limit // count + (i < limit % count) for i in range(count)
        ]
        ordered = sorted(shots, key=lambda shot: shot.due)
        for number in range(count):
            job = Job(endpoint, tuple(ordered[number::count]), limits[number], burden)
            self._tell(number, job)
        reports: dict[int, Report] = {}
        ready, interrupted, origin, ended = 0, False, time.perf_counter(), 0.0
        progress.start(description, len(shots), "requests")
        while len(reports) < count:
            try:
                number, message = self._inbox.get(timeout=WAKE_SECONDS)
                if message == "ready":
                    ready += 1
                    if ready == count:
                        origin = time.perf_counter() + START_SECONDS
                        self._tell_all(count, origin)
                elif message == "ended":
                    progress.advance()
                elif isinstance(message, Report):
                    reports[number] = message
                else:
                    raise RuntimeError("a load worker died; its words are above")
            except queue.Empty:
                continue
            except KeyboardInterrupt:
                if not interrupted:
                    interrupted, ended = True, time.perf_counter()
                    if ready < count:
                        self._tell_all(count, origin)
                    self._tell_all(count, "stop")
        progress.finish()
        exchanges = [one for report in reports.values() for one in report.exchanges]
        # Without an interrupt a pass ends with its last request, as vLLM has it.
        ended = ended or max((one.ended for one in exchanges), default=time.perf_counter())
        lags = [report.lag_ms for report in reports.values()]
        return FleetPass(
            origin,
            ended,
            exchanges,
            {key: max(lag[key] for lag in lags) for key in ("mean", "p99", "max")},
            sum(report.late_connections for report in reports.values()),
            interrupted,
        )

    def _tell_all(self, count: int, message: Any) -> None:
        for number in range(count):
            self._tell(number, message)

    def _tell(self, number: int, message: Any) -> None:
        stream = self._workers[number].stdin
        assert stream is not None
        pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
        stream.flush()

    def _listen(self, number: int, worker: subprocess.Popen[bytes]) -> None:
        """In a thread for each worker: its messages, and None when it is gone."""
        assert worker.stdout is not None
        while True:
            try:
                message = pickle.load(worker.stdout)
            except (EOFError, pickle.UnpicklingError):
                self._inbox.put((number, None))
                return
            self._inbox.put((number, message))
