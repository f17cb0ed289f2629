"""The worker processes of a run, and passes over a workload with all of them."""

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
from dataclasses import dataclass
from typing import Any

from ...quant.base.progress import Progress, Silent
from ..machine.machine_load import process_seconds
from .job import Endpoint, Exchange, Job, Report, Shot

PIPE_BYTES = 1 << 16  # what a pipe holds on Linux
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
        # A byte for every free place in flight; all workers take from it and give back.
        self._places = os.pipe()
        self._open_ends = list(self._places)
        os.set_blocking(self._places[0], False)
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the parent alone
                pass_fds=self._places,
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
        while self._open_ends:
            os.close(self._open_ends.pop())

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

        A concurrency limit holds over all workers together. An interrupt ends the pass; what was answered
        stays.
        """
        progress = progress or Silent()
        count = min(len(self._workers), len(shots), limit or len(shots))
        # More places than requests are no limit, and a pipe holds no more than so many bytes.
        places = self._places if limit is not None and limit < len(shots) else None
        if places is not None and limit is not None:
            self._set_places(min(limit, PIPE_BYTES))
        ordered = sorted(shots, key=lambda shot: shot.due)
        for number in range(count):
            job = Job(endpoint, tuple(ordered[number::count]), limit, burden, places)
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

    def cpu_seconds(self) -> float:
        """Processor time that the workers have had; 0 where the system does not say."""
        return sum(process_seconds(worker.pid) for worker in self._workers)

    def _set_places(self, count: int) -> None:
        """Exactly `count` free places; nobody holds one between passes."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._places[0], PIPE_BYTES):
                pass
        os.write(self._places[1], b"." * count)

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
