"""What a run measured and how, as its record says it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..quant.open import open_checkpoint
from .datasets import arrival_words
from .environment import checkpoint_hash, machine_name
from .inprocess import InProcessTarget
from .options import BenchOptions
from .workload import Workload

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.outputs import EngineStats


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
    from ..engine.config import EngineConfig
    from ..engine.engine import Engine

    settings = {
        "dtype": options.dtype,
        "device": options.device,
        "kv_cache_dtype": options.kv_cache_dtype,
        "window": options.window,
        "attention_sinks": options.attention_sinks,
        "block_size": options.block_size,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "scheduling_policy": options.scheduling_policy,
        "enable_prefix_caching": options.enable_prefix_caching,
        "seed": options.seed,
        "num_threads": options.num_threads,
        "cpu_activations": options.cpu_activations,
        "loras": options.lora,
        "tensor_parallel_size": options.tensor_parallel_size,
        "speculation": options.speculation,
    }
    return Engine(EngineConfig(model=model, **{**settings, **overrides}))


def identity(
    options: BenchOptions, engine: Engine, model: Path, workload: Workload
) -> dict[str, Any]:
    """What was measured and how: the part that decides whether two results may be compared."""
    quantization = open_checkpoint(model).quantization_config
    return {
        "model": options.model or model.name,
        "model_hash": checkpoint_hash(model),
        "quantization": quantization.get("quant_method") if quantization else None,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "target": InProcessTarget.name,
        "workload": workload.name,
        "workload_sha256": workload.sha256,
        "load": {
            "num_prompts": options.num_prompts,
            "request_rate": options.rate if options.request_rate else "inf",
            "burstiness": options.burstiness,
            **arrival_words(options, workload),
            "max_concurrency": options.concurrency,
            "ignore_eos": options.ignore_eos,
            "temperature": options.temperature,
            "seed": options.seed,
        },
        "engine": {
            "max_model_len": engine.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "block_size": options.block_size,
            "enable_prefix_caching": options.enable_prefix_caching,
            "num_threads": options.num_threads,
            **_unusual(options),
        },
        "device": str(engine.device),
        "machine": machine_name(str(engine.device)),
    }


def _unusual(options: BenchOptions) -> dict[str, Any]:
    """Engine options that are not what they always were; without them older results stay comparable."""
    later = (
        "cpu_activations",
        "tensor_parallel_size",
        "scheduling_policy",
        "kv_cache_dtype",
        "window",
        "attention_sinks",
    )
    usual = {name: BenchOptions.model_fields[name].default for name in later}
    found = {
        name: getattr(options, name) for name in later if getattr(options, name) != usual[name]
    }
    if options.lora:
        found["lora"] = list(options.lora)
    if options.speculation is not None:
        found["speculation"] = asdict(options.speculation)
    return found


def speculation_part(options: BenchOptions, stats: EngineStats) -> dict[str, Any] | None:
    """What speculation brought; None where there was none."""
    if options.speculation is None:
        return None
    return {
        "method": options.speculation.method,
        "num_guesses": stats.num_guesses,
        "num_accepted": stats.num_accepted_guesses,
        "acceptance": stats.num_accepted_guesses / max(1, stats.num_guesses),
    }
