"""In-process benchmark session: load, warm up, measure, score quality, build the record."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.execution.step_loop import StepRecorder
from ...quant.base.atomic_io import interrupts_held
from ...quant.base.progress import Progress
from ...quant.models import resolve_model, short_name
from ..load.inprocess import InProcessTarget, images_part, injected_delay
from ..load.load import Load, adapter_of, drive
from ..load.step_split import step_split
from ..machine.environment import peak_memory_bytes, restart_peak_memory
from ..machine.machine_meter import MachineMeter
from ..machine.pass_usage import PassMeter
from ..machine.roofline import memory_part, place_on_roofline
from ..metrics.run_statistics import phases
from ..metrics.step_trace import in_pass, step_trace_part
from ..metrics.trace import LoadPass
from ..options.options import BenchOptions
from ..quality.passage import Passage
from ..quality.positions import QualitySeries
from ..quality.sections import recorded_layer_errors
from ..quality.summary import Quality
from ..record.identity import conversations_part, engine_identity, speculation_part
from ..record.result import BenchRun
from ..record.run_record import MeasuredPass, Measurement, TargetFacts, build_run
from ..report.plan_residuals import plan_for_folder, residuals
from ..tasks.backends import EngineBackend
from ..tasks.harness import TaskScores, check_template, prepare_tasks, run_tasks
from ..workloads.datasets import build_workload, resolved_options
from ..workloads.synthetic import warmup_workload
from ..workloads.workload import Workload
from .quality import quality_passage, score_quality
from .session import BenchSession

if TYPE_CHECKING:
    from ...engine.engine import Engine


# Sequences per decode step of the reference, which makes none.
SCORING_SEQUENCES = 1


@dataclass(slots=True)
class Scores:
    """Measurements after the passes: quality, tasks, roofline, …; None if not requested or not finished."""

    peak_bytes: int | None
    preemptions: int
    quality: Quality | None = None
    series: QualitySeries | None = None
    step_split: dict[str, Any] | None = None
    tasks: TaskScores | None = None


class EngineSession(BenchSession):
    """A model loaded in this process and measured pass by pass.

    Consecutive sessions may share the `engine` of the first.

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
    ) -> None:
        self._model = resolve_model(options.model)
        self._plan = plan_for_folder(options.plan, self._model) if options.plan else None
        self._tasks = prepare_tasks(options.tasks) if options.tasks else None
        restart_peak_memory()
        self._engine = engine or load_engine(options, self._model)
        if self._tasks is not None:
            check_template(options, EngineBackend(self._engine))
        workload = build_workload(options, self._engine.tokenizer, self._engine.max_model_len)
        options = resolved_options(options, workload)
        # Before anything is measured, so that a text or a reference that does not fit loses nothing.
        self._passage = quality_passage(options, self._engine) if options.quality else None
        if options.quality and options.reference is not None:
            resolve_model(options.reference)
        self._images: dict[str, Any] | None = None
        self._load = Load(options.rate, options.burstiness, options.concurrency)
        self._target = InProcessTarget(
            self._engine,
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
        self._engine.hook = injected_delay(options.slowdown, options.slowdown_where)
        name = options.name or options.label or short_name(self._model)
        machine = MachineMeter(str(self._engine.device), passes=PassMeter())
        super().__init__(options, name, workload, machine, progress, paired_runs)
        # The garbage of loading; before each pass the load driver collects only what is young.
        gc.collect()
        self._warm_up()

    @property
    def engine(self) -> Engine:
        """The measured engine."""
        return self._engine

    def identity(self) -> dict[str, Any]:
        return engine_identity(self._options, self._engine, self._model, self._workload)

    def finish(self, *, interrupted: bool = False) -> BenchRun:
        """Score quality, measure the roofline, and build the record.

        After an interrupt (of a pass, of scoring, or elsewhere: `interrupted`) unfinished scores are left out
        and the record is marked. Needs one pass.
        """
        # With several sessions per process, or several processes, peak memory cannot be attributed.
        alone = not self._paired_runs and self._options.tensor_parallel_size == 1
        scores = Scores(
            peak_bytes=peak_memory_bytes() if alone else None,
            preemptions=self._preemptions(),
        )
        interrupted = interrupted or self._was_interrupted()
        if not interrupted:
            try:
                self._score(scores)
            except KeyboardInterrupt:
                interrupted = True
        with interrupts_held():
            measured = self._measurement(interrupted=interrupted)
            run = build_run(measured, self._facts(measured, scores), scores.series)
        run.items = None if scores.tasks is None else scores.tasks.items
        return run

    def _score(self, scores: Scores) -> None:
        """Fill `scores` one by one, so that an interrupt keeps the finished ones."""
        options, engine = self._options, self._engine
        if self._passage is not None:
            scores.quality, scores.series = score_quality(
                options, engine, self._passage, load_reference, self._progress
            )
        limit = self._load.max_concurrency
        if options.report:
            scores.step_split = step_split(engine, self._target, self._workload, limit)
        scores.preemptions = self._preemptions()  # of the load, without tasks
        if self._tasks is not None:
            backend = EngineBackend(engine, self._progress)
            scores.tasks = run_tasks(self._tasks, backend, options)

    def _facts(self, measured: Measurement, scores: Scores) -> TargetFacts:
        options, engine, passes = self._options, self._engine, measured.loads
        size = engine.scheduler.config.block_size
        of_kind = {
            **conversations_part(
                passes, self._workload, size if options.enable_prefix_caching else None
            ),
            "slowdown_where": options.slowdown_where,
            "step_split": scores.step_split,
            "step_trace": step_trace_part(passes, size),
            "speculation": speculation_part(options, engine.stats),
            "images": self._images,
            "layer_errors": recorded_layer_errors(self._model),
            "tasks": None if scores.tasks is None else scores.tasks.record,
        }
        if self._plan is not None:
            of_kind["plan"] = residuals(self._plan, engine, passes, measured.metrics)
        return TargetFacts(
            model_id=options.model or short_name(self._model),
            identity=self.identity(),
            memory=memory_part(engine, self._model, scores.peak_bytes),
            phases=phases(passes),
            preemptions=scores.preemptions,
            quality=None if scores.quality is None else scores.quality.as_dict(),
            roofline=place_on_roofline(engine, self._model, passes) if options.report else None,
            of_kind=of_kind,
        )

    def _measure(self, number: int, description: str) -> MeasuredPass:
        # Reset the prefix cache, so that a pass does not speed up the next.
        self._engine.reset_prefix_cache()
        if self._engine.images.encoders is not None:
            self._engine.images.encoders.reset()
        self._target.image_preparation.reset()
        before = self._engine.stats
        recorder = self._engine.recorder = StepRecorder(self._engine.scheduler)
        self._machine.start()
        load = self._drive(self._workload, description, self._options.duration)
        usage = self._machine.stop()
        self._images = images_part(
            self._target.image_preparation, self._engine.images.encoders, load.traces
        )
        for trace in load.traces:
            trace.lora = self._target.adapter(trace.request_id)
        self._engine.recorder = None
        load.engine_steps = in_pass(recorder.steps, load)
        after = self._engine.stats
        queries = after.prefix_cache_queries - before.prefix_cache_queries
        hits = after.prefix_cache_hits - before.prefix_cache_hits
        return MeasuredPass(
            load,
            hits / queries if queries else 0.0,
            usage,
            preemptions=after.num_preemptions - before.num_preemptions,
        )

    def _preemptions(self) -> int:
        """Preempted sequences so far, without those of rejected passes."""
        rejected = sum(measured.preemptions for measured in self._rejected)
        return self._engine.stats.num_preemptions - rejected

    def _warm_up(self) -> None:
        options, tokenizer = self._options, self._engine.tokenizer
        warmup = warmup_workload(self._workload, options.warmups, tokenizer, seed=options.seed)
        if warmup is not None and self._drive(warmup, f"{self.name}, warm-up").interrupted:
            raise KeyboardInterrupt

    def _drive(self, workload: Workload, description: str, window: float | None = None) -> LoadPass:
        return drive(
            self._target,
            workload,
            self._load.max_concurrency,
            window=window,
            progress=self._progress,
            description=description,
        )


def load_engine(options: BenchOptions, model: Path, **overrides: Any) -> Engine:
    """Build the engine of `options` for the model in a folder."""
    from ...engine.engine import Engine

    return Engine(replace(options.engine, model=model, **overrides))


def load_reference(options: BenchOptions, passage: Passage) -> Engine:
    """The reference model's engine, with KV blocks for two windows: it only scores text.

    Raises:
        BadInput: the model cannot be served, or its context is shorter than a window.
    """
    from ...engine.base.device import choose_device, choose_dtype
    from ...engine.planner.memory.cache_size import (
        DEFAULT_BLOCK_SIZE,
        DEFAULT_MAX_NUM_BATCHED_TOKENS,
    )

    device = choose_device(options.device)
    block_size = options.block_size or DEFAULT_BLOCK_SIZE[device.type]
    step = options.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
    # A window, the step after it, and a block for each document that is shorter than one.
    num_tokens = passage.longest + 2 * step + block_size * min(step, len(passage.windows))
    return load_engine(
        options,
        resolve_model(options.reference),
        max_num_seqs=SCORING_SEQUENCES,
        kv_cache_memory_bytes=None,
        num_blocks=-(-num_tokens // block_size),
        cpu_activations=16,
        gpu_memory_utilization=None,
        swap_space_bytes=0,
        # Not "auto": a reference rounds nothing that it has computed.
        kv_cache_dtype=str(choose_dtype(options.dtype, device)).removeprefix("torch."),
        window=None,
        attention_sinks=0,
        kv_budget=None,
        kv_eviction=None,
        loras={},
        tensor_parallel_size=1,
        speculation=None,
    )
