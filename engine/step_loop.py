"""Steps on their way: computed where they are asked for, or by a thread while the next one is scheduled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from .model_runner import ModelRunner, StepResult
from .step_plan import StepPlan


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
        wait: computes it, or waits for the thread that does. Where none does, to be asked once.
    """

    plan: StepPlan
    start: float
    scheduled: float
    kv_blocks_used: int
    wait: Callable[[], ComputedStep]


class StepLoop:
    """Runs plans in the order in which they come.

    Serial: a step is computed when somebody waits for it. Overlapped: a thread computes it at once, and
    meanwhile its successor is scheduled and its predecessor's tokens become text. The tokens that a step
    needs and its predecessor draws are put in their places by this thread, between the two.
    """

    def __init__(self, runner: ModelRunner, *, overlapped: bool) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "llmopt-steps") if overlapped else None

    @property
    def is_overlapped(self) -> bool:
        return self._thread is not None

    def launch(self, plan: StepPlan) -> Callable[[], ComputedStep]:
        """Take a plan on; returns how to get its outcome."""
        if self._thread is None:
            return partial(self._compute, plan)
        return self._thread.submit(self._compute, plan).result

    def close(self) -> None:
        """Let what is under way run out."""
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, plan: StepPlan) -> ComputedStep:
        begun = time.perf_counter()
        result = self._runner.execute(plan)
        plan.keep(result.tokens)
        return ComputedStep(result, begun, time.perf_counter())
