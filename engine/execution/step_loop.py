"""Step loops: synchronous, or with async scheduling on a CPU thread or a GPU; traces of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import StepPlan
from .model_runner import ModelRunner
from .step import UNTIMED, Phase, SampledTokens, StepResult, StepTimer


class ComputedStep(NamedTuple):
    """Result of a step, and when the runner started and ended it, on the clock of `time.perf_counter`."""

    result: StepResult
    started: float
    ended: float


class InFlightStep(NamedTuple):
    """Scheduled step whose outputs are not processed yet, with `time.perf_counter` of its scheduling. `wait`
    computes it, or waits for its result; a serial loop calls it once."""

    plan: StepPlan
    start: float
    scheduled: float
    kv_blocks_used: int
    timer: StepTimer
    wait: Callable[[], ComputedStep]


class SerialLoop:
    """Synchronous: a step is computed when its result is waited for."""

    is_overlapped = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> Callable[[], ComputedStep]:
        return partial(_compute, self._runner, plan, timer)

    def close(self) -> None:
        """No step is in flight."""


class ThreadedLoop:
    """Async scheduling on the CPU: a thread computes the steps, and fills in their placeholders. Meanwhile
    the next step is scheduled, and tokens of the previous one are detokenized."""

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
    """Async scheduling on a GPU: a step's kernels are launched at once, in stream order, on device tokens.
    The host meanwhile detokenizes and schedules; it waits for tokens only if a step needs them there."""

    is_overlapped = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._last: _OnDevice | None = None

    def launch(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> Callable[[], ComputedStep]:
        self._last = _OnDevice(self._runner, plan, timer, self._last)
        return self._last.wait

    def close(self) -> None:
        """In-flight steps are in the device's stream; there is no thread to end."""


StepLoop = SerialLoop | ThreadedLoop | DeviceAsyncLoop
"""Runs plans in the order in which they are launched: `launch` returns a function that waits for the result.

A plan may have output placeholders for tokens that the previous one samples: the loop fills them in. With
async scheduling (`is_overlapped`) a plan may be launched before its predecessor's tokens are known.
"""


def open_loop(runner: ModelRunner, device: torch.device, *, overlapped: bool) -> StepLoop:
    if not overlapped:
        return SerialLoop(runner)
    return DeviceAsyncLoop(runner) if device.type == "cuda" else ThreadedLoop(runner)


class _OnDevice:
    """Step that is launched on creation; `wait` raises its error."""

    def __init__(
        self, runner: ModelRunner, plan: StepPlan, timer: StepTimer, before: _OnDevice | None
    ) -> None:
        self._previous = before
        self._started = time.perf_counter()
        self._outcome: ComputedStep | Exception | None = None
        self._sampled: SampledTokens | None = None
        sampled: SampledTokens | None = None
        try:
            if plan.has_placeholders:
                assert before is not None
                if not runner.reads_placeholders(plan):
                    sampled = before.sampled
                if sampled is None:  # the host reads them, or has them already
                    plan = plan.resolved(before.wait().result.tokens)
            step = runner.launch(plan, sampled, timer)
            self._finish, self._sampled = step.wait, step.sampled
        except Exception as error:
            self._outcome = error

    @property
    def sampled(self) -> SampledTokens | None:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._sampled

    def wait(self) -> ComputedStep:
        if self._outcome is None:
            try:
                result = self._finish()
            except Exception as error:
                self._outcome = error
            else:
                started, before = self._started, self._previous
                if before is not None and isinstance(before._outcome, ComputedStep):
                    started = max(started, before._outcome.ended)  # when the device could start it
                self._outcome = ComputedStep(result, started, time.perf_counter())
            self._previous = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def _compute(
    runner: ModelRunner,
    plan: StepPlan,
    timer: StepTimer,
    before: Future[ComputedStep] | None = None,
) -> ComputedStep:
    """Run a step whose placeholders are for the tokens of the step `before`, which has ended by now."""
    started = time.perf_counter()
    if before is not None:
        plan = plan.resolved(before.result().result.tokens)
    return ComputedStep(runner.execute(plan, timer), started, time.perf_counter())


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Trace of a step. `start` is on the clock of `time.perf_counter`.

    In a serial loop its parts follow each other; with async scheduling they overlap with the steps around it.

    Attributes:
        schedule_seconds: time to plan it, and to allocate its blocks.
        execute_seconds: time of the model and the sampler.
        update_seconds: time to append the tokens to their requests, and to detokenize.
        step_seconds: time from the start of its scheduling until its outputs are complete.
        prefill_tokens: positions computed of prompts, and recomputed after a preemption.
        decode_tokens: positions computed to sample the next output token, draft tokens included.
        kv_slots_unfilled: slots in the step's blocks without a token after it.
        replayed: True if the forward pass replayed a captured graph, False if it was eager.
        phases: seconds of each phase; empty without `phases` in the recorder.
    """

    start: float
    schedule_seconds: float
    execute_seconds: float
    update_seconds: float
    step_seconds: float
    prefill_tokens: int
    decode_tokens: int
    num_rows: int
    num_preemptions: int
    kv_blocks_used: int
    kv_slots_unfilled: int
    replayed: bool
    phases: Mapping[Phase, float] = field(default_factory=dict)

    @property
    def decode_only(self) -> bool:
        return not self.prefill_tokens


class StepRecorder:
    """Trace of an engine's steps, by `engine.recorder`; `phases` are timed too, by synchronizing a GPU."""

    def __init__(self, scheduler: Scheduler, *, phases: bool = False) -> None:
        self.records_phases = phases
        self._scheduler = scheduler
        self._num_preemptions = scheduler.num_preemptions
        self.steps: list[StepTrace] = []

    def note(self, step: InFlightStep, computed: ComputedStep, update_seconds: float) -> None:
        """Append a step that ends now."""
        plan = step.plan
        size, total = self._scheduler.config.block_size, self._scheduler.num_preemptions
        decode = sum(
            row.num_tokens
            for row in plan.rows
            if row.num_samples and row.num_tokens == 1 and row.start >= row.num_prompt_tokens
        )
        self.steps.append(
            StepTrace(
                start=step.start,
                schedule_seconds=step.scheduled - step.start,
                execute_seconds=computed.ended - computed.started,
                update_seconds=update_seconds,
                step_seconds=time.perf_counter() - step.start,
                prefill_tokens=plan.num_tokens - decode,
                decode_tokens=decode + sum(computed.result.num_draft_tokens.values()),
                num_rows=len(plan.rows),
                num_preemptions=total - self._num_preemptions,
                kv_blocks_used=step.kv_blocks_used,
                kv_slots_unfilled=sum(len(row.block_ids) * size - row.end for row in plan.rows),
                replayed=computed.result.replayed,
                phases=dict(step.timer.seconds) if self.records_phases else {},
            )
        )
        self._num_preemptions = total
