"""Engine thread and its bridge to the asyncio event loop (vLLM's AsyncLLM).

A step that fails ends its own requests with an error, and the engine goes on with the others.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ....base.errors import Failure
from ...base.device import enter_device
from ...base.host import give_back_freed_memory
from ...base.sampling_params import SamplingParams
from ...core.engine import Engine
from ...multimodal.encoder import EncodingError
from ...scheduling.outputs import RequestOutput
from ...scheduling.request import Request
from ...scheduling.scheduler_config import StepPace
from ..protocol.errors import ApiError, RetryAfter, TooMany, Unavailable
from ..protocol.server_options import ServerOptions
from .metrics import ServerMetrics
from .request_record import Job, OutputStream

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row, but for an image. With more, the cause is hardly one request."""

MAX_NAMED = 32
"""Request ids in the log line of a failed step; each begins with the id of its response."""

IDLE_SECONDS, MOST_IDLE_SECONDS = 0.5, 60.0
"""Idle seconds after which freed memory goes back to the system, and after which it is not looked for."""

_FATAL = (Failure, AssertionError, torch.AcceleratorError)
"""A lost process, contradicting state, and a device error, after which a CUDA context is unusable."""

_log = logging.getLogger(__name__)


class RecoveringSteps:
    """Runs an engine's steps, and aborts the requests of a step that fails.

    Attributes:
        failed_requests: ids of the requests that the last step ended by failing, which may be none, because
            waiting ones stay in the queue. None: the step did not fail.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_in_a_row = 0
        self.failed_requests: list[str] | None = None

    def step(self) -> list[RequestOutput]:
        """The outputs of a step; none after a failure. Raises `Exception`: the engine cannot go on: the
        step's own error."""
        self.failed_requests = None
        try:
            outputs = self._engine.step()
        except _FATAL:
            raise
        except Exception as error:
            self._num_in_a_row += not isinstance(error, EncodingError)
            if self._num_in_a_row >= MAX_FAILED_STEPS:
                raise
            self.failed_requests = failed = self._engine.abort_failed()
            named = ", ".join(failed[:MAX_NAMED])
            _log.exception("a step failed, and with it %d requests: %s", len(failed), named)
            return []
        self._num_in_a_row = 0
        return outputs


T = TypeVar("T")

WARM_UP_TOKENS = 16


_EngineCall = tuple[Callable[[Engine], Any], asyncio.Future[Any]]
"""Work of the engine's thread, and the future of its result for the caller."""


class EngineLoop:
    """Runs an engine on a dedicated thread; nothing else touches the engine while it runs.

    The event loop submits calls, which run between two steps; all outputs of a step are delivered in one
    wake-up of the event loop. Without unfinished requests the thread blocks on its inbox. A step that fails
    ends its own requests; the loop ends where the engine cannot go on.

    Public methods must be called on the event loop that `start` was called on.

    Attributes:
        unavailable: why the engine does not serve; None while it does.
        max_sequences_of_key: sequences that an API key may have waiting or running.
        is_draining: True if the server is shutting down: requests in flight finish, then it stops.
        is_warm, has_failed: events of the warmed-up engine, and of one that cannot go on.
    """

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.metrics = ServerMetrics()
        self._options = options
        self._retry_after = RetryAfter()
        self.is_warm, self.has_failed = asyncio.Event(), asyncio.Event()
        self._step_began: float | None = None
        self._engine = engine
        self._inbox: queue.SimpleQueue[_EngineCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drive, name="llmopt-engine", daemon=True)
        self._streams: dict[str, OutputStream] = {}
        num_running = engine.scheduler.config.max_num_seqs
        self.max_sequences_of_key = options.share_of_key(options.max_waiting) + num_running
        self._turns: Counter[int] = Counter()
        self._keys: dict[str, int] = {}
        self._aside: list[str] = []
        self._calls: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self.is_draining = False
        self.unavailable: str | None = None

    @property
    def is_ready(self) -> bool:
        return self.is_warm.is_set() and self.unavailable is None and not self.is_draining

    @property
    def stalled_seconds(self) -> float | None:
        """Age of a step that has outlasted `step_timeout_seconds`; None without one."""
        began = self._step_began
        age = 0.0 if began is None else time.perf_counter() - began
        return age if age > self._options.step_timeout_seconds else None

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    async def run(self, work: Callable[[Engine], T]) -> T:
        """Run `work` on the engine's thread between two steps; returns or raises what it does. Raises
        `Unavailable`: the engine has failed or is stopping."""
        if self.unavailable is not None:
            raise Unavailable(self.unavailable)
        future: asyncio.Future[T] = self._event_loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._inbox.put((work, future))
        return await future

    async def submit(self, jobs: Sequence[Job]) -> OutputStream:
        """Add the jobs to the engine, all or none of them. Raises `BadInput`: the engine rejects one;
        `TooMany`: the waiting queue would exceed `max_waiting`; `Unavailable`: the engine has failed or is
        stopping."""
        seconds = self._options.request_timeout_seconds
        stream = OutputStream(jobs, seconds, self._close_stream, self._hold_stream)
        self._streams.update((job.request_id, stream) for job in jobs)
        try:
            await self.run(lambda engine: self._add_all(engine, jobs))
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, response_id: str, key: int = 0) -> bool:
        """Abort a response of an API key, whose client gets 409; False if there is no such one."""
        streams = {
            stream
            for name, stream in self._streams.items()
            if name.startswith(f"{response_id}/") and stream.jobs[0].key == key
        }
        for stream in streams:
            stream.push(ApiError(409, "the request was aborted", code="aborted"))
            stream.close()
        return bool(streams)

    def _close_stream(self, stream: OutputStream) -> None:
        """Drop a stream and abort its unfinished requests within one step. Idempotent."""
        names = [job.request_id for job in stream.jobs]
        open_ids = [name for name in names if self._streams.pop(name, None)]
        if stream.is_held:
            stream.is_held = False
            self._hold_stream(stream)

        def abort(engine: Engine) -> None:
            for name in open_ids:
                self._keys.pop(name, None)
                if engine.abort(name):
                    self.metrics.note_unfinished(name, "abort")

        if open_ids and self.unavailable is None:
            self._inbox.put((abort, self._event_loop.create_future()))

    def _hold_stream(self, stream: OutputStream) -> None:
        """Let the sequences of a stream wait for its reader, or run again."""
        names, is_held = [job.request_id for job in stream.jobs], stream.is_held

        def work(engine: Engine) -> None:
            waiting = engine.scheduler.waiting
            for name in names:
                (waiting.hold if is_held else waiting.resume)(name)

        self._inbox.put((work, self._event_loop.create_future()))

    def fail(self, reason: str) -> None:
        """Fail all pending streams and calls with `Unavailable`, and reject later ones."""
        self.unavailable = self.unavailable or reason
        for stream in set(self._streams.values()):
            stream.push(Unavailable(self.unavailable))
        for future in list(self._calls):
            if not future.done():
                future.set_exception(Unavailable(self.unavailable))
        self.is_warm.set()

    def stop(self, timeout_seconds: float = 4.0) -> None:
        """Stop the thread after its current step; unfinished requests fail."""
        self.fail("the server is stopping")
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _drive(self) -> None:
        """Thread main loop: run calls, step the engine, deliver outputs, until stopped or failed."""
        engine, steps = self._engine, RecoveringSteps(self._engine)
        try:
            enter_device(engine.device)  # a new thread begins with cuda:0
            _warm_up(engine)
            self.metrics.begin(engine)
            self._post(self.is_warm.set)
            config, seconds = engine.scheduler.config, self._options.max_step_seconds
            pace = StepPace(seconds, config.block_size, config.max_num_batched_tokens)
            engine.scheduler.pace = pace  # of a warm engine's steps alone
            while not self._stopping:
                calls = self._run_calls(wait=not engine.has_work())
                outputs = self._step(steps) if engine.has_work() else []
                self.metrics.note_step(outputs)
                if calls or outputs:
                    self._post(self._deliver, calls, outputs)
        except Exception as error:
            if isinstance(error, Failure):
                _log.error("the engine failed: %s", error)
            else:
                _log.exception("the engine failed")
            self._post(self.fail, f"the engine failed ({type(error).__name__}): restart the server")
            self._post(self.has_failed.set)

    def _step(self, steps: RecoveringSteps) -> list[RequestOutput]:
        """Run one step, and tell the clients of the requests that it ended by failing."""
        self._step_began = time.perf_counter()
        outputs = steps.step()
        self._step_began = None
        for name in self._aside:
            stream = self._streams.get(name)
            if stream is None or not stream.is_held:  # else it waits for its reader by now
                self._engine.scheduler.waiting.resume(name)
        self._aside.clear()
        for output in outputs:
            if output.finish_reason is not None:
                self._retry_after.record_finish()
        if steps.failed_requests is not None:
            self.metrics.note_failed_step(steps.failed_requests)
            problem = "the engine failed on a step of this request: try again"
            error = ApiError(500, problem, code="step_failed")
            for request_id in steps.failed_requests:
                self._post(self._push, request_id, error)
        return outputs

    def _push(self, request_id: str, output: RequestOutput | ApiError) -> None:
        if stream := self._streams.get(request_id):
            stream.push(output)

    def _run_calls(self, *, wait: bool) -> list[Callable[[], None]]:
        """Run the calls that the inbox has by now, waiting for a first one where `wait`; returns functions
        that resolve their futures, for the event loop. Calls that arrive meanwhile wait for a step, which a
        burst of requests would put off otherwise."""
        calls: list[Callable[[], None]] = []
        num_calls = self._inbox.qsize()
        seconds: float | None = IDLE_SECONDS
        while wait or len(calls) < num_calls:
            try:
                call = self._inbox.get(wait, seconds)
            except queue.Empty:
                gc.collect()  # bodies in reference cycles, of which nothing reminds an idle server
                give_back_freed_memory()
                # Responses are still written and sent after the engine's last step: look again, ever later.
                seconds = 2 * seconds if seconds and seconds < MOST_IDLE_SECONDS else None
                continue
            if call is None:
                return calls
            if wait:
                wait, num_calls = False, 1 + self._inbox.qsize()
            work, future = call
            try:
                calls.append(partial(_resolve, future, future.set_result, work(self._engine)))
            except Exception as error:
                calls.append(partial(_resolve, future, future.set_exception, error))
        return calls

    def _deliver(
        self, calls: Sequence[Callable[[], None]], outputs: Sequence[RequestOutput]
    ) -> None:
        for resolve in calls:
            resolve()
        for output in outputs:
            self._push(output.request_id, output)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._event_loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the event loop is closed: the server was forced to stop
            self._stopping = True

    def _add_all(self, engine: Engine, jobs: Sequence[Job]) -> None:
        scheduler, max_waiting = engine.scheduler, self._options.max_waiting
        num_free = max(0, scheduler.config.max_num_seqs - len(scheduler.running))
        num_added = sum(job.params.num_sequences for job in jobs)
        num_waiting = len(scheduler.waiting) + num_added - num_free
        if num_waiting > max_waiting:
            problem = f"{num_waiting} sequences would wait, at most {max_waiting} may"
            headers = self._retry_after.retry_after(num_waiting - max_waiting)
            raise TooMany(f"{problem}: try again later", headers)
        self._make_place(engine, jobs[0].key)
        for index, job in enumerate(jobs):
            try:
                engine.add_request(
                    job.request_id,
                    job.token_ids,
                    job.params,
                    arrival_seconds=job.arrival_seconds,
                    lora=job.lora,
                    priority=job.priority,
                    turn=self._turn(engine, job),
                    cache_salt=job.cache_salt,
                    pooling=job.pooling,
                    images=job.images,
                )
            except Exception:
                for added in jobs[:index]:
                    engine.abort(added.request_id)
                raise
        self._keys.update((job.request_id, job.key) for job in jobs)
        self.metrics.note_added([job.params for job in jobs if job.pooling is None])

    def _turn(self, engine: Engine, job: Job) -> int:
        """Place of a key's next request among those of other keys: start-time fair queueing by sequences. The
        first request of a key that has none comes before all."""
        head, turns = engine.scheduler.waiting.head, self._turns
        now = max(turns.values(), default=0) if head is None else head.turn
        turn = max(now, turns[job.key]) if job.key in self._keys.values() else now - 1
        turns[job.key] = turn + job.params.num_sequences
        return turn

    def _make_place(self, engine: Engine, key: int) -> None:
        """Where a key has no request and sequences wait, preempt in the next step the last request of the key
        that runs most: one key may not hold all places for as long as it likes."""
        scheduler = engine.scheduler
        is_full = len(scheduler.running) >= scheduler.config.max_num_seqs or scheduler.waiting.head
        if not is_full or key in self._keys.values():
            return
        by_key: dict[int, list[Request]] = {}
        for request in scheduler.running:
            if request.request_id not in scheduler.waiting.held_ids:
                by_key.setdefault(self._keys.get(request.request_id, key), []).append(request)
        most = max(by_key.values(), key=len, default=[])
        if len(most) > 1:
            name = max(most, key=lambda request: request.rank).request_id
            scheduler.waiting.hold(name)
            self._aside.append(name)


def _resolve(future: asyncio.Future[Any], setter: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():  # else the caller was cancelled
        setter(outcome)


def _warm_up(engine: Engine) -> None:
    """Warm-up request: a prefill and a decode step, so that no client pays for lazy initialization."""
    length = max(1, min(WARM_UP_TOKENS, engine.scheduler.longest_sequence - 2))
    params = SamplingParams(max_tokens=2, temperature=0.0, seed=0, ignore_eos=True)
    engine.add_request("warm-up", [0] * length, params)
    while engine.has_unfinished():
        engine.step()
    engine.reset_prefix_cache()
    give_back_freed_memory()  # what loading and making the application have freed
