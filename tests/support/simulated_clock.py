"""A clock for whole runs of `bench`: the model's steps take the time that the clock says, on any machine.

`with simulated_clock():` replaces `time.perf_counter`. It advances by a fixed time, with noise of 1 %, for a
step of the model and for a call of the sampler, and by almost nothing for a read. The evidence of the kernel
on other processes is left out, because it belongs to another clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from llmopt.bench.machine import machine_meter, pass_usage
from llmopt.engine.execution.model_runner import ModelRunner
from llmopt.engine.sampling.sampler import Sampler

READ_SECONDS = 1e-6
"""Time of a read, so that a loop that waits for a time ends."""

STEP_SECONDS, SAMPLE_SECONDS = 2e-3, 2e-5


class SimulatedClock:
    """Seconds that only reads and simulated work advance."""

    def __init__(self, seed: int = 0) -> None:
        self._now, self._draw = 1000.0, random.Random(seed)

    def __call__(self) -> float:
        self._now += READ_SECONDS
        return self._now

    def taking(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which takes `seconds` with noise."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self._now += seconds * self._draw.gauss(1, 0.01)
            return call(*arguments, **options)

        return timed


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
        patch.setattr(pass_usage, "disturbance", lambda *_: None)
        patch.setattr(machine_meter, "other_load", lambda *_: 0.0)
        yield
