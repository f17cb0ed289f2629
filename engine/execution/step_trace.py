"""Step traces: what each step of the engine did and how long its phases took, kept while somebody asks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..scheduling.scheduler import Scheduler
from .step_loop import ComputedStep, InFlightStep
from .step_phases import Phase


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step. `start` is on the clock of `time.perf_counter`.

    In a serial loop its parts follow each other; in an overlapped one they lie beside those of its
    neighbours.

    Attributes:
        schedule_seconds: deciding what to compute, and taking the blocks.
        execute_seconds: the model and the sampler.
        update_seconds: booking the tokens, and turning them into text.
        step_seconds: from the start of its scheduling until its outputs were there.
        prefill_tokens: positions computed of prompts, and of answers after a preemption.
        decode_tokens: positions computed to draw the next tokens of answers, guesses included.
        num_rows: sequences in the step.
        num_preemptions: sequences that had to give their blocks to others.
        kv_blocks_used: blocks that the sequences held during the step.
        kv_slots_unfilled: slots in the blocks of the step's sequences that hold no token after it.
        replayed: whether a captured graph computed the forward pass; otherwise it was eager.
        phases: seconds of each phase; empty where the recorder does not ask for them.
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
        """Whether it computed no position of a prompt."""
        return not self.prefill_tokens


class StepRecorder:
    """Keeps a trace of the steps of the engine that it is given to: `engine.recorder = StepRecorder(...)`.

    With `phases` the engine also measures each phase; on a GPU it then waits for the device at both ends of
    each.
    """

    def __init__(self, scheduler: Scheduler, *, phases: bool = False) -> None:
        self.asks_for_phases = phases
        self._scheduler = scheduler
        self._num_preemptions = scheduler.num_preemptions
        self.steps: list[StepTrace] = []

    def note(self, step: InFlightStep, computed: ComputedStep, update_seconds: float) -> None:
        """Add the step that ends now."""
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
                phases=dict(step.timer.seconds) if self.asks_for_phases else {},
            )
        )
        self._num_preemptions = total
