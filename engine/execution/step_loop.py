"""Steps on their way: computed where they are asked for, or while the next one is scheduled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..scheduling.step_plan import StepPlan
from .model_runner import ModelRunner, StepResult


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What a step drew, and when the runner began with it and ended, on the clock of `time.perf_counter`."""

    result: StepResult
    begun: float
    ended: float


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A step that has been scheduled.

    Attributes:
        plan: what it computes.
        start, scheduled: when its scheduling began and ended, on the clock of `time.perf_counter`.
        kv_blocks_used: blocks that sequences hold while it runs.
        wait: computes it, or waits for who does. In a serial loop to be asked once.
    """

    plan: StepPlan
    start: float
    scheduled: float
    kv_blocks_used: int
    wait: Callable[[], ComputedStep]


class StepLoop(Protocol):
    """Runs plans in the order in which they come."""

    @property
    def is_overlapped(self) -> bool:
        """Whether a plan may come before its predecessor's tokens are known."""
        ...

    def launch(self, plan: StepPlan) -> Callable[[], ComputedStep]:
        """Take a plan on; returns how to get its outcome."""
        ...

    def close(self) -> None:
        """Let what is under way run out."""
        ...


def open_loop(runner: ModelRunner, device: torch.device, *, overlapped: bool) -> StepLoop:
    """The loop of an engine that computes on `device`."""
    if not overlapped:
        return SerialLoop(runner)
    return AheadLoop(runner) if device.type == "cuda" else ThreadedLoop(runner)


class SerialLoop:
    """A step is computed when somebody waits for it."""

    is_overlapped = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> Callable[[], ComputedStep]:
        return partial(_compute, self._runner, plan)

    def close(self) -> None:
        """Nothing is under way."""


class ThreadedLoop:
    """A thread computes a step at once, on the CPU.

    Meanwhile its successor is scheduled and its predecessor's tokens become text. The tokens that a step
    needs and its predecessor draws are put in their places by this thread, between the two.
    """

    is_overlapped = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "llmopt-steps")

    def launch(self, plan: StepPlan) -> Callable[[], ComputedStep]:
        return self._thread.submit(_compute, self._runner, plan).result

    def close(self) -> None:
        self._thread.shutdown()


class AheadLoop:
    """A step is given to the device at once, which computes it behind its predecessor.

    The tokens that it needs of that one stay on the device, so that the device goes on while the host waits
    for tokens, makes text of them, and schedules. A step that looks at such a token on the host waits.
    """

    is_overlapped = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._last: _Launched | None = None

    def launch(self, plan: StepPlan) -> Callable[[], ComputedStep]:
        self._last = _Launched(self._runner, plan, self._last)
        return self._last.wait

    def close(self) -> None:
        """What is under way is the device's."""


class _Launched:
    """A step that is on the device from the beginning. What goes wrong is told to who waits."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, before: _Launched | None) -> None:
        self._plan, self._before = plan, before
        self._begun = time.perf_counter()
        self._outcome: ComputedStep | Exception | None = None
        try:
            if before is not None and runner.must_know(plan):
                before.wait()
            self._finish = runner.launch(plan)
        except Exception as error:
            self._outcome = error

    def wait(self) -> ComputedStep:
        if self._outcome is None:
            try:
                result = self._finish()
            except Exception as error:
                self._outcome = error
            else:
                self._plan.keep(result.tokens)
                self._outcome = ComputedStep(result, self._start(), time.perf_counter())
            self._before = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _start(self) -> float:
        """When the device could begin with it."""
        if self._before is None or not isinstance(self._before._outcome, ComputedStep):
            return self._begun
        return max(self._begun, self._before._outcome.ended)


def _compute(runner: ModelRunner, plan: StepPlan) -> ComputedStep:
    begun = time.perf_counter()
    result = runner.execute(plan)
    plan.keep(result.tokens)
    return ComputedStep(result, begun, time.perf_counter())
