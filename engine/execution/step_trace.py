"""Step traces: tokens, KV blocks and seconds of each step, kept by a recorder."""

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

    In a serial loop its parts follow each other; with async scheduling they overlap those of the steps before
    and after it.

    Attributes:
        schedule_seconds: planning it, and allocating its blocks.
        execute_seconds: the model and the sampler.
        update_seconds: appending the tokens to their requests, and detokenizing.
        step_seconds: from the start of its scheduling until its outputs are complete.
        prefill_tokens: positions computed of prompts, and recomputed after a preemption.
        decode_tokens: positions computed to sample the next output token, draft tokens included.
        num_rows: sequences in the step.
        num_preemptions: sequences preempted for it.
        kv_blocks_used: KV blocks in use during the step.
        kv_slots_unfilled: slots in the blocks of the step's sequences without a token after it.
        replayed: whether the forward pass replayed a captured graph; otherwise it was eager.
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
        """Whether it has no prefill tokens."""
        return not self.prefill_tokens


class StepRecorder:
    """Keeps a trace of each step of an engine: `engine.recorder = StepRecorder(...)`.

    With `phases` the engine also measures each phase; on a GPU it then synchronizes at both ends of each.
    """

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
