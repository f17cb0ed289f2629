"""Step loops: a step is computed when its result is asked for, or while the next one is scheduled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..scheduling.step_plan import StepPlan
from .model_runner import ModelRunner
from .step_phases import UNTIMED, StepTimer
from .step_result import DrawnTokens, StepResult


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What a step drew, and when the runner began with it and ended, on the clock of `time.perf_counter`."""

    result: StepResult
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that is scheduled and not settled.

    Attributes:
        plan: what it computes.
        start, scheduled: when its scheduling began and ended, on the clock of `time.perf_counter`.
        kv_blocks_used: blocks that sequences hold while it runs.
        timer: of its phases.
        wait: computes it, or waits for who does. In a serial loop to be asked once.
    """

    plan: StepPlan
    start: float
    scheduled: float
    kv_blocks_used: int
    timer: StepTimer
    wait: Callable[[], ComputedStep]


class StepLoop(Protocol):
    """Runs plans in the order in which they come.

    A plan may have output placeholders for what the one before it draws: the loop hands those tokens on.
    """

    @property
    def is_overlapped(self) -> bool:
        """Whether a plan may come before its predecessor's tokens are known."""
        ...

    def launch(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> Callable[[], ComputedStep]:
        """Take a plan on; returns how to get its outcome."""
        ...

    def close(self) -> None:
        """Let what is in flight run out."""
        ...


def open_loop(runner: ModelRunner, device: torch.device, *, overlapped: bool) -> StepLoop:
    """The loop of an engine that computes on `device`."""
    if not overlapped:
        return SerialLoop(runner)
    return DeviceAsyncLoop(runner) if device.type == "cuda" else ThreadedLoop(runner)


class SerialLoop:
    """A step is computed when somebody waits for it; the next one is scheduled with its tokens."""

    is_overlapped = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> Callable[[], ComputedStep]:
        return partial(_compute, self._runner, plan, timer)

    def close(self) -> None:
        """Nothing is in flight."""


class ThreadedLoop:
    """Async scheduling on the CPU: a thread computes a step at once.

    Meanwhile its successor is scheduled and its predecessor's tokens become text. The thread puts the tokens
    of one step in the place of the next plan's placeholders; it sees plans and results, and nothing else of
    the engine.
    """

    is_overlapped = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "llmopt-steps")
        self._last: Future[ComputedStep] | None = None

    def launch(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> Callable[[], ComputedStep]:
        before = self._last if plan.has_placeholders else None
        self._last = self._thread.submit(_compute, self._runner, plan, timer, before)
        return self._last.result

    def close(self) -> None:
        self._thread.shutdown()


class DeviceAsyncLoop:
    """Async scheduling on a GPU: a step is given to the device at once, which computes it behind its
    predecessor.

    The tokens that it needs of that one stay on the device, so that the device goes on while the host waits
    for tokens, makes text of them, and schedules. A step that looks at such a token on the host waits.
    """

    is_overlapped = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._last: _OnDevice | None = None

    def launch(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> Callable[[], ComputedStep]:
        self._last = _OnDevice(self._runner, plan, timer, self._last)
        return self._last.wait

    def close(self) -> None:
        """What is in flight is the device's."""


class _OnDevice:
    """A step that is on the device from the beginning. What goes wrong is told to who waits."""

    def __init__(
        self, runner: ModelRunner, plan: StepPlan, timer: StepTimer, before: _OnDevice | None
    ) -> None:
        self._previous = before
        self._started = time.perf_counter()
        self._outcome: ComputedStep | Exception | None = None
        self._drawn: DrawnTokens | None = None
        drawn: DrawnTokens | None = None
        try:
            if plan.has_placeholders:
                assert before is not None
                if runner.reads_placeholders(plan):
                    plan = plan.resolved(before.wait().result.tokens)
                else:
                    drawn = before.drawn
            step = runner.launch(plan, drawn, timer)
            self._finish, self._drawn = step.wait, step.drawn
        except Exception as error:
            self._outcome = error

    @property
    def drawn(self) -> DrawnTokens | None:
        """Its tokens on the device."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._drawn

    def wait(self) -> ComputedStep:
        if self._outcome is None:
            try:
                result = self._finish()
            except Exception as error:
                self._outcome = error
            else:
                self._outcome = ComputedStep(result, self._start(), time.perf_counter())
            self._previous = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _start(self) -> float:
        """When the device could begin with it."""
        if self._previous is None or not isinstance(self._previous._outcome, ComputedStep):
            return self._started
        return max(self._started, self._previous._outcome.ended)


def _compute(
    runner: ModelRunner,
    plan: StepPlan,
    timer: StepTimer,
    before: Future[ComputedStep] | None = None,
) -> ComputedStep:
    """Run a step whose placeholders are for what the one `before` draws, which is done by now."""
    started = time.perf_counter()
    if before is not None:
        plan = plan.resolved(before.result().result.tokens)
    return ComputedStep(runner.execute(plan, timer), started, time.perf_counter())
