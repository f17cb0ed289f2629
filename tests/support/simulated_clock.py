"""A clock for whole runs of `bench`: the model's steps take the time that the clock says, on any machine.

`with simulated_clock():` replaces `time.perf_counter`. It advances by a fixed time, with noise of 1 %, for a
step of the model and for a call of the sampler, and by almost nothing for a read. The evidence of the kernel
on other processes is left out, because it belongs to another clock.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from llmopt.bench.machine import machine_meter, pass_usage
from llmopt.engine.execution import decode_graphs
from llmopt.engine.execution.model_runner import ModelRunner
from llmopt.engine.sampling.sampler import Sampler

READ_SECONDS = 1e-6
"""Time of a read, so that a loop that waits for a time ends."""

STEP_SECONDS, SAMPLE_SECONDS = 2e-3, 2e-5


class SimulatedClock:
    """Seconds that only reads and simulated work advance."""

    def __init__(self, seed: int = 0, read_seconds: float = READ_SECONDS) -> None:
        self.now, self._read_seconds = 1000.0, read_seconds
        self._draw = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.advance(self._read_seconds)

    def advance(self, seconds: float) -> float:
        with self._lock:  # another thread's advance is not lost
            self.now += seconds
            return self.now

    def taking(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which takes `seconds` with noise of 1 %."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self.advance(seconds * self._draw.gauss(1, 0.01))
            return call(*arguments, **options)

        return timed


class _Selector(selectors.DefaultSelector):
    """Advances the clock in place of waiting."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._clock.advance(timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on a simulated clock, for tasks that only sleep and compute."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__(_Selector(clock))
        self._simulated = clock

    def time(self) -> float:
        return self._simulated.now


@contextmanager
def simulated_clock(seed: int = 0) -> Iterator[None]:
    clock = SimulatedClock(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", clock)
        for owner, name, seconds in (
            (ModelRunner, "launch", STEP_SECONDS),
            (Sampler, "begin", SAMPLE_SECONDS),
            (Sampler, "largest", SAMPLE_SECONDS),
        ):
            patch.setattr(owner, name, clock.taking(seconds, getattr(owner, name)))
        captured = decode_graphs._captured_argmax  # samples in the place of the sampler

        def captured_argmax(*arguments: Any) -> Callable[..., Any]:
            return clock.taking(SAMPLE_SECONDS, captured(*arguments))

        patch.setattr(decode_graphs, "_captured_argmax", captured_argmax)
        patch.setattr(pass_usage, "disturbance", lambda *_: None)
        patch.setattr(machine_meter, "other_load", lambda *_: 0.0)
        yield
