"""One benchmark from options to a run folder: load, warm up, measure, score, place, write."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.execution.step_trace import StepRecorder
from ...quant.base.progress import Progress, Silent
from ...quant.model.models import resolve_model
from ...quant.open import open_checkpoint
from ..files.interrupt import interrupts_held
from ..load.inprocess import InProcessTarget, WithAdapter
from ..load.load import Load, drive
from ..load.slow_sampler import slow_sampler
from ..load.step_split import step_split
from ..machine.ceilings import measure_ceilings
from ..machine.energy import EnergyMeter
from ..machine.environment import describe, peak_memory_bytes, restart_peak_memory
from ..machine.machine_load import CpuTimes, other_load
from ..machine.machine_state import machine_state
from ..machine.roofline import roofline_part
from ..metrics.cost import cost_part
from ..metrics.steady import steady_state
from ..metrics.step_trace import STEPS_NAME, in_pass, step_trace_part, write_steps
from ..metrics.trace import LoadPass
from ..options.options import BenchOptions
from ..quality.eval_tasks import prepare_tasks, run_tasks
from ..quality.layer_errors import recorded_layer_errors
from ..quality.quality import EVALUATION_TEXT, Passage, log_probabilities, read_passage, score
from ..record import result as record
from ..record.identity import identity, speculation_part
from ..record.result import BenchRun
from ..report.plan_residuals import plan_for_folder, residuals
from ..workloads.datasets import build_workload, settled, warmup_workload
from ..workloads.workload import Workload

if TYPE_CHECKING:
    import torch

    from ...engine.engine import Engine
    from .http_session import HttpSession

# Enough cache for one window of text at a time.
SCORING_SEQUENCES = 1


class BenchSession:
    """A model that is loaded and warmed up, to be measured pass by pass.

    Several sessions may live at once and take turns, so that what the machine does meanwhile hits all
    of them alike. `arms` is then the same text in each: their results are compared pass by pass.
    Sessions that follow each other may share the `engine` of the first.

    Raises:
        BadInput: the model, the data set or an option is unusable.
    """

    def __init__(
        self,
        options: BenchOptions,
        progress: Progress | None = None,
        *,
        arms: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._options = options
        self._progress = progress or Silent()
        self._arms = arms
        self._model = resolve_model(options.model)
        self._plan = plan_for_folder(options.plan, self._model) if options.plan else None
        self._tasks = prepare_tasks(options.tasks) if options.tasks else None
        restart_peak_memory()
        self._engine = engine or load_engine(options, self._model)
        tokenizer = self._engine.tokenizer
        self._workload = build_workload(options, tokenizer, self._engine.max_model_len)
        options = self._options = settled(options, self._workload)
        self._load = Load(options.rate, options.burstiness, options.concurrency)
        self._target = InProcessTarget(
            self._engine,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            seed=options.seed,
            slowdown=options.slowdown if options.slowdown_where == "step" else 1.0,
            loras=tuple(options.lora),
        )
        if options.slowdown_where == "sampler" and options.slowdown > 1.0:
            slow_sampler(self._engine, options.slowdown)
        device = str(self._engine.device)
        self._energy = EnergyMeter(device)
        self._state_before = machine_state(device)
        self._passes: list[LoadPass] = []
        self._hit_rates: list[float] = []
        self._other_loads: list[float | None] = []
        warmup = warmup_workload(self._workload, options.warmups, tokenizer, seed=options.seed)
        if warmup is not None and self._drive(warmup, f"{self.name}, warm-up").interrupted:
            raise KeyboardInterrupt

    @property
    def name(self) -> str:
        """How the record and its reports call what is measured."""
        return self._options.name or self._options.label or self._model.name

    def say_notes(self) -> None:
        """Tell the person what to know about the workload."""
        for note in self._workload.notes:
            self._progress.note(f"{self._workload.name}: {note}")

    @property
    def engine(self) -> Engine:
        """The engine that is measured."""
        return self._engine

    @property
    def workload(self) -> Workload:
        """What every pass sends."""
        return self._workload

    @property
    def passes(self) -> Sequence[LoadPass]:
        """The passes so far."""
        return self._passes

    @property
    def hit_rates(self) -> Sequence[float | None]:
        """Of each pass, the share of prompt tokens that the prefix cache gave."""
        return self._hit_rates

    def identity(self) -> dict[str, Any]:
        """What is measured and how."""
        return identity(self._options, self._engine, self._model, self._workload)

    @property
    def has_passes(self) -> bool:
        """Whether there is anything to finish."""
        return bool(self._passes)

    def run_pass(self) -> bool:
        """One more pass over the workload; False when it was interrupted."""
        # What one pass leaves in the cache must not speed up the next.
        self._engine.reset_prefix_cache()
        before = self._engine.stats
        number, count = len(self._passes) + 1, self._options.num_runs
        clock = CpuTimes.now()
        recorder = self._engine.recorder = StepRecorder(self._engine.scheduler)
        self._energy.start()
        one = self._drive(self._workload, f"{self.name}, pass {number} of {count}")
        self._energy.stop()
        self._engine.recorder = None
        one.engine_steps = in_pass(recorder.steps, one)
        self._other_loads.append(other_load(clock, CpuTimes.now()))
        after = self._engine.stats
        queries = after.prefix_cache_queries - before.prefix_cache_queries
        hits = after.prefix_cache_hits - before.prefix_cache_hits
        self._passes.append(one)
        self._hit_rates.append(hits / queries if queries else 0.0)
        return not one.interrupted

    def finish(self, *, interrupted: bool = False) -> BenchRun:
        """Score quality, place the run under the roofs, and put the record together.

        An interrupt, be it of a pass, of the quality or elsewhere (`interrupted`), leaves out the
        scores that were not finished; the record then says so. Needs one pass.
        """
        # Of several sessions in one process, or one in several, there is no telling whose memory it is.
        alone = not self._arms and self._options.tensor_parallel_size == 1
        peak_bytes = peak_memory_bytes() if alone else None
        interrupted = interrupted or any(one.interrupted for one in self._passes)
        quality = None
        if self._options.quality and not interrupted:
            try:
                quality = score_quality(self._options, self._engine, self._progress)
            except KeyboardInterrupt:
                interrupted = True
        split = None
        if not interrupted:
            limit = self._load.max_concurrency
            split = step_split(self._engine, self._target, self._workload, limit)
        preemptions = self._engine.stats.num_preemptions  # those of the load, before the tasks
        tasks = None
        if self._tasks is not None and not interrupted:
            try:
                tasks = run_tasks(
                    self._tasks,
                    self._engine,
                    limit=self._options.tasks_limit,
                    seed=self._options.seed,
                    progress=self._progress,
                )
            except KeyboardInterrupt:
                interrupted = True
        with interrupts_held():
            return self._record(quality, peak_bytes, interrupted, split, preemptions, tasks)

    def _record(
        self,
        quality: dict[str, Any] | None,
        peak_bytes: int | None,
        interrupted: bool,
        split: dict[str, Any] | None,
        preemptions: int,
        tasks: dict[str, Any] | None,
    ) -> BenchRun:
        options, engine, passes = self._options, self._engine, self._passes
        runs = [record.of_one_run(one) for one in passes]
        workload = self._workload
        found = record.vllm_part(
            options,
            passes,
            model_id=options.model or self._model.name,
            date=datetime.now().strftime("%Y%m%d-%H%M%S"),
        )
        found["llmopt"] = {
            "schema": record.SCHEMA_VERSION,
            "run_id": uuid.uuid4().hex,
            "arms": self._arms,
            "name": self.name,
            "interrupted": interrupted,
            "slowdown": options.slowdown,
            "slowdown_where": options.slowdown_where,
            "identity": self.identity(),
            "workload": record.workload_part(workload),
            "num_warmups": options.warmups,
            "num_runs": len(passes),
            "runs": [
                {**run, "prefix_cache_hit_rate": rate, "other_load": load}
                for run, rate, load in zip(runs, self._hit_rates, self._other_loads, strict=True)
            ],
            "metrics": record.distributions(passes, options.seed),
            "spread": record.spread(runs),
            "peaks": record.peaks(passes),
            "steady_state": steady_state(passes, options.concurrency),
            "client_lag_ms": record.client_lag(passes),
            "phases": record.phases(passes),
            "step_split": split,
            "step_trace": step_trace_part(passes, engine.scheduler.config.block_size),
            "preemptions": preemptions,
            "speculation": speculation_part(options, engine.stats),
            "prefix_cache_hit_rate": sum(self._hit_rates) / len(self._hit_rates),
            "memory": {
                "weight_bytes": engine.memory.weight_bytes,
                "checkpoint_bytes": open_checkpoint(self._model).weight_bytes,
                "kv_cache_bytes": engine.memory.kv_cache_bytes,
                "kv_cache": {
                    "dtype": engine.stats.kv_dtype,
                    "bytes_per_token": engine.memory.kv_bytes_per_token,
                    "tokens": engine.stats.kv_tokens_total,
                    "blocks": engine.stats.kv_blocks_total,
                },
                "peak_resident_bytes": peak_bytes,
            },
            "quality": quality,
            "layer_errors": recorded_layer_errors(self._model),
            "tasks": tasks,
            "roofline": place_on_roofline(engine, self._model, passes),
            "energy": self._energy.part(found["total_input_tokens"], found["total_output_tokens"]),
            "environment": {
                **describe(str(engine.device)),
                "before": self._state_before,
                "after": machine_state(str(engine.device)),
            },
        }
        if options.gpu_hour_price is not None:
            totals = (
                found[key] for key in ("duration", "total_input_tokens", "total_output_tokens")
            )
            found["llmopt"]["cost"] = cost_part(options.gpu_hour_price, *totals)
        if self._plan is not None:
            metrics = found["llmopt"]["metrics"]
            found["llmopt"]["plan"] = residuals(self._plan, engine, passes, metrics)
        return BenchRun(record.plain(found), passes)

    def _drive(self, workload: Workload, description: str) -> LoadPass:
        limit = self._load.max_concurrency
        return drive(
            self._target, workload, limit, progress=self._progress, description=description
        )


def run_bench(options: BenchOptions, progress: Progress | None = None) -> BenchRun:
    """Measure one model, or the server at `base_url`, under one load. Nothing is written.

    An interrupt during the load ends it: the record holds what finished and says `interrupted`.

    Raises:
        BadInput: the model, the data set or an option is unusable.
    """
    if options.base_url is not None:
        from .http_session import run_http_bench

        return run_http_bench(options, progress)
    session = BenchSession(options, progress)
    session.say_notes()
    for _ in range(options.num_runs):
        if not session.run_pass():
            break
    return session.finish()


def run_interleaved(
    options: Sequence[BenchOptions], progress: Progress | None = None
) -> list[BenchRun]:
    """Measure several models, or servers, under the same load, pass by pass in turns; all are there at once.

    Each round begins with another model, so that no one is always first. An interrupt ends all of
    them; those that have a pass are returned.
    """
    arms = uuid.uuid4().hex
    with ExitStack() as stack:
        sessions = [open_session(one, progress, arms, stack) for one in options]
        sessions[0].say_notes()
        for number in range(options[0].num_runs):
            turn = number % len(sessions)
            if not all(session.run_pass() for session in sessions[turn:] + sessions[:turn]):
                begun = [session for session in sessions if session.has_passes]
                return [session.finish(interrupted=True) for session in begun]
        return [session.finish() for session in sessions]


def open_session(
    options: BenchOptions, progress: Progress | None, arms: str | None, stack: ExitStack
) -> BenchSession | HttpSession:
    """What measures the model, or the server at `base_url`; `stack` ends what a server's client started."""
    if options.base_url is None:
        return BenchSession(options, progress, arms=arms)
    from .http_session import HttpSession

    return stack.enter_context(HttpSession(options, progress, arms=arms))


def load_engine(options: BenchOptions, model: Path, **overrides: Any) -> Engine:
    """The engine that `options` describe, for the model in a folder."""
    from ...engine.config.config import EngineConfig
    from ...engine.engine import Engine

    settings = {
        "dtype": options.dtype,
        "device": options.device,
        "kv_cache_dtype": options.kv_cache_dtype,
        "window": options.window,
        "attention_sinks": options.attention_sinks,
        "block_size": options.block_size,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "swap_space_bytes": options.swap_space_bytes,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "scheduling_policy": options.scheduling_policy,
        "overlapped_loop": options.overlapped_loop,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "seed": options.seed,
        "num_threads": options.num_threads,
        "cpu_activations": options.cpu_activations,
        "loras": options.lora,
        "tensor_parallel_size": options.tensor_parallel_size,
        "speculation": options.speculation,
    }
    return Engine(EngineConfig(model=model, **{**settings, **overrides}))


def score_quality(options: BenchOptions, engine: Engine, progress: Progress) -> dict[str, Any]:
    """Perplexity of the model, and its distance from the reference where one was given."""
    passage = read_passage(
        engine.tokenizer,
        max_model_len=engine.max_model_len,
        num_tokens=options.quality_tokens,
        path=options.quality_text or EVALUATION_TEXT,
    )
    scored = WithAdapter(engine, next(iter(options.lora), None))
    own = log_probabilities(scored, passage, progress=progress, what=options.name or "model")
    if options.reference is None:
        return score(passage, own).as_dict()
    reference = resolve_model(options.reference)
    theirs = reference_log_probabilities(options, reference, passage, progress)
    return score(passage, own, theirs, options.reference).as_dict()


def reference_log_probabilities(
    options: BenchOptions, reference: Path, passage: Passage, progress: Progress
) -> list[torch.Tensor]:
    """The reference model's distributions, from an engine of its own with a small cache."""
    from ...engine.base.device import choose_device

    on_gpu = choose_device(options.device).type == "cuda"
    engine = load_engine(
        options,
        reference,
        max_num_seqs=SCORING_SEQUENCES,
        kv_cache_memory_bytes=None,
        # The engine that was measured holds its share of the device already.
        gpu_memory_utilization=1.0 if on_gpu else None,
        swap_space_bytes=0,
        kv_cache_dtype="auto",
        window=None,
        attention_sinks=0,
        loras={},
        tensor_parallel_size=1,
        speculation=None,
    )
    return log_probabilities(engine, passage, progress=progress, what="reference")


def place_on_roofline(
    engine: Engine, model: Path, passes: Sequence[LoadPass]
) -> dict[str, Any] | None:
    """Measured roofs and points; None for a model whose shape the planner does not know."""
    from ...engine.planner.model.shapes import ModelShape
    from ...quant.base.errors import BadInput

    try:
        shape = ModelShape.from_config(open_checkpoint(model).config)
    except BadInput:
        return None
    memory = engine.memory
    # A tied embedding is the output head too, and the planner counts it once, as read.
    weight_bytes = memory.weight_bytes_per_step if shape.tied else memory.weight_bytes
    return roofline_part(
        [step for one in passes for step in one.steps],
        shape,
        measure_ceilings(engine.device, engine.dtype, weight_bytes),
        weight_bytes=weight_bytes,
        kv_bytes_per_element=engine.memory.kv_bytes_per_token / shape.kv_bytes_per_token(1),
        unquantized_bytes=engine.dtype.itemsize,
    )


def write_run(run: BenchRun, target: Path, *, with_csv: bool = False) -> Path:
    """Write the run folder `target`, whole or not at all; returns it."""
    with interrupts_held():
        from ..files.run_folder import whole_folder
        from ..report.report import write_report

        with whole_folder(target) as folder:
            (folder / record.RESULT_NAME).write_text(record.to_json(run.result), encoding="utf-8")
            (folder / "environment.json").write_text(
                record.to_json(run.result["llmopt"]["environment"]), encoding="utf-8"
            )
            record.write_requests(folder / record.REQUESTS_NAME, run.passes)
            write_steps(folder / STEPS_NAME, run.passes)
            if with_csv:
                record.write_requests_csv(folder / record.REQUESTS_CSV_NAME, run.passes)
            write_report(run.result, run.passes, folder)
        return target
