"""In-process benchmark session: an engine driven directly, with its step trace, memory and roofline."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.progress import Progress
from ...engine.execution.step_loop import StepRecorder
from ...engine.planner.catalog import facts_of
from ...quant.source.models import resolve_model, short_name
from ..load.inprocess import (
    ImagePreparation,
    InProcessTarget,
    images_part,
    injected_delay,
    step_split,
)
from ..load.load import adapter_of, drive
from ..machine.environment import peak_memory_bytes, restart_peak_memory
from ..machine.machine_meter import MachineMeter
from ..machine.pass_usage import PassMeter
from ..machine.roofline import memory_part, place_on_roofline
from ..metrics.run_statistics import phases
from ..metrics.trace import LoadPass, in_pass, step_trace_part
from ..options.options import BenchOptions
from ..record.identity import conversations_part, engine_identity, speculation_part
from ..record.result import BenchRun
from ..record.run_record import MeasuredPass, Measurement, TargetFacts
from ..report.parts import recorded_layer_errors
from ..report.plan_page import plan_for_folder, residuals
from ..workloads.datasets import build_workload, resolved_options
from ..workloads.workload import Workload
from .quality import quality_passage, score_quality
from .session import LOAD, QUALITY, REPORT, BenchSession, RunProgress
from .task_backends import EngineBackend
from .tasks import check_template, prepare_tasks

if TYPE_CHECKING:
    from ...engine.core.engine import Engine
    from ..quality.scoring import SharedScores


class EngineSession(BenchSession):
    """A model loaded in this process and measured pass by pass.

    Consecutive sessions may share the `engine` of the first.

    Args:
        shared: scores that other processes made.

    Raises:
        BadInput: the model, the data set or an option is invalid.
    """

    def __init__(
        self,
        options: BenchOptions,
        progress: Progress | None = None,
        *,
        paired_runs: str | None = None,
        engine: Engine | None = None,
        shared: SharedScores | None = None,
    ) -> None:
        self._shared = shared
        self._model = resolve_model(options.model)
        self._model_facts = facts_of(self._model)
        self._plan = plan_for_folder(options.plan, self._model) if options.plan else None
        # Before the model is loaded, so that a missing task costs nothing.
        tasks = prepare_tasks(options.tasks, options) if options.tasks else None
        run_progress = RunProgress.of(progress, options)
        run_progress.begin(LOAD, f"loading {short_name(self._model)}")
        restart_peak_memory()
        self.engine = engine or load_engine(options, self._model)
        if tasks is not None:
            check_template(options, EngineBackend(self.engine))
        workload = build_workload(options, self.engine.tokenizer, self.engine.max_model_len)
        options = resolved_options(options, workload)
        # Before anything is measured, so that a text or a reference that does not fit loses nothing.
        self._passage = (
            quality_passage(options, self.engine.tokenizer, self.engine.max_model_len)
            if options.quality
            else None
        )
        if options.quality and options.reference is not None:
            resolve_model(options.reference)
        self._images: dict[str, Any] | None = None
        self._step_split: dict[str, Any] | None = None
        self._target = InProcessTarget(
            self.engine,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            seed=options.seed,
            adapter=partial(
                adapter_of,
                names=tuple(options.loras),
                assignment=options.lora_assignment,
                seed=options.seed,
            ),
        )
        self.engine.hook = injected_delay(options.slowdown, options.slowdown_where)
        name = options.name or options.label or short_name(self._model)
        machine = MachineMeter(str(self.engine.device), passes=PassMeter())
        super().__init__(options, name, workload, machine, run_progress, paired_runs, tasks)
        # The garbage of loading; before each pass the load driver collects only what is young.
        gc.collect()
        self._warm_up(options.warmups, self.engine.tokenizer, self._drive)

    def say_model(self) -> None:
        self._progress.note(f"{self.name}: {self._model_facts.line}")

    def identity(self) -> dict[str, Any]:
        return engine_identity(self._options, self.engine, self._model, self.workload)

    def finish(self, *, interrupted: bool = False) -> BenchRun:
        # With several sessions per process, or several processes, peak memory cannot be attributed.
        alone = not self._paired_runs and self._options.tensor_parallel_size == 1
        self._peak_bytes = peak_memory_bytes() if alone else None
        self._preemptions = self._preempted()
        return super().finish(interrupted=interrupted)

    def _score(self) -> None:
        options, engine = self._options, self.engine
        if self._passage is not None:
            self._progress.begin(QUALITY, "quality")
            self._quality = score_quality(
                options, engine, self._passage, self._progress, self._shared
            )
        if options.report:
            self._progress.begin(REPORT, "where the time of a step goes")
            limit = options.concurrency
            self._step_split = step_split(engine, self._target, self.workload, limit)
        self._preemptions = self._preempted()  # of the load, without tasks
        self._score_tasks(lambda: EngineBackend(engine, self._progress))

    def _facts(self, measured: Measurement) -> TargetFacts:
        options, engine, passes = self._options, self.engine, measured.loads
        size = engine.scheduler.config.block_size
        parts = {
            "identity": self.identity(),
            "memory": memory_part(engine, self._model, self._peak_bytes),
            "model": {**asdict(self._model_facts), "line": self._model_facts.line},
            "phases": phases(passes),
            "preemptions": self._preemptions,
            "quality": self._quality.record,
            "roofline": place_on_roofline(engine, self._model, passes) if options.report else None,
            **conversations_part(
                passes, self.workload, size if options.enable_prefix_caching else None
            ),
            "slowdown_where": options.slowdown_where,
            "step_split": self._step_split,
            "step_trace": step_trace_part(passes, size),
            "speculation": speculation_part(options, engine.stats),
            "images": self._images,
            "layer_errors": recorded_layer_errors(self._model),
            "tasks": self._task_record,
        }
        if self._plan is not None:
            closed = math.isinf(options.rate) and options.ramp_up_strategy is None
            clients = options.concurrency if closed else None
            parts["plan"] = residuals(self._plan, engine, passes, measured.metrics, clients)
        return TargetFacts(options.model or short_name(self._model), parts)

    def _measure(self, number: int, description: str) -> MeasuredPass:
        # Reset the prefix cache, so that a pass does not speed up the next.
        self.engine.reset_prefix_cache()
        if self.engine.images.encoders is not None:
            self.engine.images.encoders.reset()
        self._target.images = ImagePreparation()
        before = self.engine.stats
        recorder = self.engine.recorder = StepRecorder(self.engine.scheduler)
        self._machine.start()
        load = self._drive(self.workload, description, self._options.duration)
        usage = self._machine.stop()
        encoders = self.engine.images.encoders
        self._images = images_part(self._target.images, encoders, load.traces)
        for trace in load.traces:
            trace.lora = self._target.adapter(trace.request_id)
        self.engine.recorder = None
        load.engine_steps = in_pass(recorder.steps, load)
        self._expect_quality(load)
        after = self.engine.stats
        queries = after.prefix_cache_queries - before.prefix_cache_queries
        hits = after.prefix_cache_hits - before.prefix_cache_hits
        return MeasuredPass(
            load,
            hits / queries if queries else 0.0,
            usage,
            preemptions=after.num_preemptions - before.num_preemptions,
        )

    def _expect_quality(self, load: LoadPass) -> None:
        """Expect the passage, which is prompts alone, at the rate of the pass's fastest prefill."""
        rates = [step.prefill_tokens / step.step_seconds for step in load.engine_steps]
        if self._passage is not None and max(rates, default=0.0):
            models = 1 + (self._options.reference is not None)
            self._progress.expect(QUALITY, models * self._passage.num_scored / max(rates))

    def _preempted(self) -> int:
        """Preempted sequences so far, without those of rejected passes."""
        rejected = sum(measured.preemptions for measured in self._rejected)
        return self.engine.stats.num_preemptions - rejected

    def _drive(self, workload: Workload, description: str, window: float | None = None) -> LoadPass:
        return drive(
            self._target,
            workload,
            self._options.concurrency,
            window=window,
            progress=self._progress,
            description=description,
        )


def load_engine(options: BenchOptions, model: Path, **overrides: Any) -> Engine:
    """Build the engine of `options` for the model in a folder."""
    from ...engine.core.engine import Engine

    return Engine(replace(options.engine, model=model, **overrides))
