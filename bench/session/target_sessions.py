"""Benchmark sessions: an engine in this process, with its step trace, memory and roofline, and a server over
HTTP, with the client certified."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import BadInput
from ...base.memory import peak_memory_bytes, restart_peak_memory
from ...base.progress import Progress
from ...engine.execution.step_loop import StepRecorder
from ...engine.planner.catalog import facts_of, find_model
from ...engine.planner.plan_json import read_plan
from ...quant.source.models import resolve_model, short_name
from ..load.address import (
    BACKENDS,
    CHAT,
    COMPLETIONS,
    Address,
    Scraper,
    find_served,
    pass_metrics,
    server_facts,
    server_metrics_part,
)
from ..load.driver import HttpDriver
from ..load.inprocess import (
    ImagePreparation,
    InProcessTarget,
    images_part,
    injected_delay,
    step_split,
)
from ..load.load import adapter_of, drive
from ..machine.environment import hardware_facts, machine_name
from ..machine.machine_meter import MachineMeter
from ..machine.pass_usage import PassMeter
from ..machine.roofline import memory_part, place_on_roofline
from ..metrics.run_statistics import phases, silent_failures
from ..metrics.trace import LoadPass, in_pass, step_trace_part
from ..options.options import DEFAULT_CONCURRENCY, BenchOptions
from ..quality.drafts import draft_scores
from ..record.result import BenchRun
from ..record.run_record import (
    MeasuredPass,
    Measurement,
    conversations_part,
    engine_identity,
    identity_part,
    speculation_part,
)
from ..report.parts import recorded_layer_errors
from ..report.plan_page import residuals
from ..workloads.datasets import build_workload, resolved_options
from ..workloads.workload import Workload, shared_tokens
from .quality import ScoredQuality, check_depths, quality_passage, score_quality, score_served
from .session import LOAD, QUALITY, REPORT, BenchSession, RunProgress
from .task_backends import EngineBackend, ServedBackend
from .tasks import check_template, prepare_tasks, with_scores

if TYPE_CHECKING:
    from ...engine.core.engine import Engine


class EngineSession(BenchSession):
    """A model in this process, pass by pass; sessions may share an `engine`."""

    def __init__(
        self,
        options: BenchOptions,
        progress: Progress | None = None,
        *,
        paired_runs: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._model = resolve_model(options.model)
        self._model_facts = facts_of(self._model)
        self._plan = read_plan(options.plan, find_model(str(self._model))) if options.plan else None
        # Before the model is loaded, so that a missing task costs nothing.
        tasks = prepare_tasks(options.task_names, options) if options.task_names else None
        run_progress = RunProgress.of(progress, options)
        run_progress.begin(LOAD, f"loading {short_name(self._model)}")
        restart_peak_memory()
        self.engine = engine or load_engine(options, self._model)
        if tasks is not None:
            check_template(options, EngineBackend(self.engine), tasks)
        workload = build_workload(options, self.engine.tokenizer, self.engine.max_model_len)
        options = resolved_options(options, workload)
        # Before anything is measured, so that a text or a reference that does not fit loses nothing.
        self._passage = None
        if options.quality:
            limits = self.engine.tokenizer, self.engine.max_model_len
            self._passage = quality_passage(options, *limits)
        check_depths(options, self.engine.max_model_len)
        if options.quality and options.reference is not None:
            resolve_model(options.reference)
        if options.quality_kv and not self.engine.takes_other_caches:
            raise BadInput(
                "--quality-kv: layers with a constant state, or several workers, have no other KV cache"
            )
        self._images: dict[str, Any] | None = None
        self._step_split: dict[str, Any] | None = None
        rule = {"assignment": options.lora_assignment, "seed": options.seed}
        self._target = InProcessTarget(
            self.engine,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            seed=options.seed,
            adapter=partial(adapter_of, names=tuple(options.loras), **rule),
        )
        self.engine.hook = injected_delay(options.slowdown, options.slowdown_where)
        name = options.name or options.label or short_name(self._model)
        machine = MachineMeter(str(self.engine.device), passes=PassMeter())
        names = {"model_id": options.model or short_name(self._model)}
        measured = Measurement(options, name, names, workload, machine, paired_runs)
        super().__init__(measured, run_progress, tasks)
        # The garbage of loading; before each pass the load driver collects only what is young.
        gc.collect()
        self._warm_up(options.warmups, self.engine.tokenizer, self._drive)

    def say_model(self) -> None:
        self._progress.note(f"{self.name}: {self._model_facts.line}")

    def identity(self) -> dict[str, Any]:
        return engine_identity(self._options, self.engine, self._model, self.workload)

    def finish(self, *, interrupted: bool = False) -> BenchRun:
        # With several sessions per process, or several processes, peak memory cannot be attributed.
        alone = not self.measured.paired_runs and self._options.tensor_parallel_size == 1
        self._peak_bytes = peak_memory_bytes() if alone else None
        self._preemptions = self._preempted()
        return super().finish(interrupted=interrupted)

    def _score(self) -> None:
        options, engine = self._options, self.engine
        if self._passage is not None:
            self._progress.begin(QUALITY, "quality")
            self._quality = score_quality(options, engine, self._passage, self._progress)
        if options.report:
            self._progress.begin(REPORT, "where the time of a step goes")
            limit = options.concurrency
            self._step_split = step_split(engine, self._target, self.workload, limit)
        self._preemptions = self._preempted()  # of the load, without tasks
        self._score_tasks(lambda: EngineBackend(engine, self._progress))
        if options.speculation is not None:
            rows, items = draft_scores(self.passes[0].traces, options.speculation.num_tokens)
            self._task_scores = with_scores(self._task_scores, rows, items)

    def _facts(self) -> dict[str, Any]:
        options, engine, passes = self._options, self.engine, self.passes
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
            parts["plan"] = residuals(self._plan, engine, passes, self.measured.metrics, clients)
        return parts

    def _measure(self, number: int, description: str) -> MeasuredPass:
        # Reset the prefix cache, so that a pass does not speed up the next.
        self.engine.reset_prefix_cache()
        if self.engine.images.encoders is not None:
            self.engine.images.encoders.reset()
        self._target.images = ImagePreparation()
        before = self.engine.stats
        recorder = self.engine.recorder = StepRecorder(self.engine.scheduler)
        self.measured.machine.start()
        load = self._drive(self.workload, description, self._options.duration)
        usage = self.measured.machine.stop()
        encoders = self.engine.images.encoders
        self._images = images_part(self._target.images, encoders, load.traces)
        for trace in load.traces:
            trace.lora = self._target.adapter(trace.request_id)
        self.engine.recorder = None
        load.engine_steps = in_pass(recorder.steps, load)
        rates = [step.prefill_tokens / step.step_seconds for step in load.engine_steps]
        if self._passage is not None and (fastest := max(rates, default=0.0)):
            # The passage is prompts alone: expect the rate of the pass's fastest prefill.
            models = 1 + (self._options.reference is not None)
            self._progress.expect(QUALITY, models * self._passage.num_scored / fastest)
        after = self.engine.stats
        queries = after.prefix_cache_queries - before.prefix_cache_queries
        hits = after.prefix_cache_hits - before.prefix_cache_hits
        return MeasuredPass(
            load,
            hits / queries if queries else 0.0,
            usage,
            preemptions=after.num_preemptions - before.num_preemptions,
        )

    def _preempted(self) -> int:
        rejected = sum(measured.preemptions for measured in self.measured.rejected)
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
    from ...engine.core.engine import Engine

    return Engine(replace(options.engine, model=model, **overrides))


TARGET = "http"
ELSEWHERE = "the server is on another machine"


class HttpSession(BenchSession):
    """A server, pass by pass; leaving ends the workers. BadInput: an option, no model, no tokenizer."""

    def __init__(
        self,
        options: BenchOptions,
        progress: Progress | None = None,
        *,
        paired_runs: str | None = None,
    ) -> None:
        tasks = prepare_tasks(options.task_names, options) if options.task_names else None
        address = self._address = Address.of(options)
        served = self._served = find_served(options, address)
        self._said = server_facts(address, served.model)
        check_depths(options, served.max_model_len)
        if tasks is not None:
            check_template(options, self._task_backend(options, progress), tasks)
        if options.is_pooling:
            # Nothing is generated: the whole context is the prompt's.
            options = options.model_copy(update={"output_len": 1, "random_output_len": 1})
        workload = build_workload(options, served.tokenizer, served.max_model_len)
        if workload.is_multi_turn and BACKENDS[options.backend] != CHAT:
            raise BadInput(
                "conversations go to a server as chat messages: give --backend openai-chat"
            )
        options = resolved_options(options, workload)
        name = options.name or options.label or Path(served.model).name
        machine = MachineMeter(
            local_gpu() if address.is_loopback else "cpu",
            passes=PassMeter(started["pid"]) if (started := options.started_server) else None,
            no_energy_because=None if address.is_loopback else ELSEWHERE,
        )
        names = {"model_id": served.model, "backend": options.backend}
        names["tokenizer_id"] = served.tokenizer_name
        measured = Measurement(options, name, names, workload, machine, paired_runs)
        super().__init__(measured, progress, tasks)
        self._scraper = Scraper(address)
        self._driver = HttpDriver(options, address, served, self._progress)
        try:
            if options.check_client:
                self._progress.begin(LOAD, "measuring the client's own error")
                self._driver.check()
            # A pooling request holds several items, a rerank a query besides.
            inputs = options.random_batch_size + 1 if options.is_pooling else 1
            self._warm_up(options.warmups * inputs, served.tokenizer, self._driver.warm_up)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._scraper.stop()
        self._driver.close()

    def say_notes(self) -> None:
        super().say_notes()
        if self._scraper.reason is not None:
            self._progress.note(f"no server metrics: {self._scraper.reason}")

    def identity(self) -> dict[str, Any]:
        """The identity, as far as the client knows it and the server says it."""
        options, backend = self._options, BACKENDS[self._options.backend]
        engine = {
            "backend": backend if backend == CHAT or options.is_pooling else COMPLETIONS,
            "path": self._address.path,
            "client_workers": self._driver.num_workers,
            "extra_body": options.extra_body or None,
        }
        # Parts that only some loads have, so that older results stay comparable.
        if options.loras:
            engine |= {"lora": list(options.loras), "lora_assignment": options.lora_assignment}
        if options.is_pooling:
            engine["batch_size"] = options.random_batch_size
        hardware = {"gpu": options.server_gpu or self._said["gpu"]}
        identity = identity_part(
            options,
            self.workload,
            model=self._served.model,
            model_hash="not known: it is behind a server",
            quantization=None,
            dtype="not known",
            target=TARGET,
            engine=engine,
            device="behind a server",
            machine=f"client: {machine_name('cpu')}",
            hardware=hardware_facts(local_gpu()) if options.started_server else hardware,
        )
        version = self._said["version"] or (options.started_server or {}).get("version")
        return {**identity, "server": {"model": self._said["model"], "version": version}}

    def _facts(self) -> dict[str, Any]:
        measured = self.measured
        by_pass = [one_pass.server_metrics for one_pass in measured.passes]
        server_metrics = server_metrics_part(self._scraper, by_pass)
        preemptions = server_metrics["counters"].get("num_preemptions")
        sizes = ("weight_bytes", "checkpoint_bytes", "kv_cache_bytes", "peak_resident_bytes")
        options = self._options
        silent = silent_failures(
            measured.loads,
            concurrency=options.concurrency,
            fixed_lengths=options.ignore_eos and not options.is_pooling,
            gauges=server_metrics["gauges"],
            hit_rate=measured.prefix_cache_hit_rate,
            shared=shared_tokens(self.workload),
        )
        if preemptions:
            silent.append(
                f"the server preempted {round(preemptions)} requests, and computed them again"
            )
        return {
            "identity": self.identity(),
            "silent_failures": [*silent, *self._driver.doubts()],
            "memory": dict.fromkeys(sizes),
            "quality": self._quality.record,
            "preemptions": None if preemptions is None else round(preemptions),
            **conversations_part(measured.loads, self.workload, None),
            "quality_reason": self._quality.reason,
            "tasks": self._task_record,
            "client": self._driver.client_part(measured.metrics, measured.loads),
            "server": {
                "url": self._address.url,
                "path": self._address.path,
                "max_model_len": self._served.max_model_len,
                "started": self._options.started_server,
            },
            "server_metrics": server_metrics,
        }

    def _score(self) -> None:
        """Score the served model and the tasks; a note says what is missing."""
        options, adapters = self._options, list(self._options.loras)
        if options.quality and not options.is_pooling:
            if len(adapters) > 1:
                reason = "quality is scored of one adapter: give one --lora"
                self._quality = ScoredQuality(reason=reason)
            else:
                self._progress.begin(QUALITY, "quality")
                served = replace(self._served, model=adapters[0]) if adapters else self._served
                self._quality = score_served(options, self._address, served, self._progress)
            if self._quality.reason is not None:
                self._progress.note(self._quality.reason)
        self._score_tasks(lambda: self._task_backend(options, self._progress))

    def _task_backend(
        self, options: BenchOptions, progress: Progress | None = None
    ) -> ServedBackend:
        return ServedBackend(
            self._address.json_client(options.request_timeout),
            self._address,
            self._served,
            backend=BACKENDS[options.backend],
            concurrency=options.concurrency or DEFAULT_CONCURRENCY,
            progress=progress,
        )

    def _measure(self, number: int, description: str) -> MeasuredPass:
        self._scraper.start()
        self.measured.machine.start()
        window = self._options.duration
        load, hit_rate, used = self._driver.drive(self.workload, number, description, window)
        usage = self.measured.machine.stop(used)
        of_server = pass_metrics(*self._scraper.stop())
        usage["client_machine_load"] = usage["other_load"]
        # With a server on this machine, its CPU use cannot be told from background load.
        if self._address.is_loopback:
            usage["other_load"] = None
        if hit_rate is None and of_server is not None:
            hit_rate = of_server["prefix_cache_hit_rate"]
        return MeasuredPass(load, hit_rate, usage, server_metrics=of_server)


def local_gpu() -> str:
    """The device whose counters and clocks are read for a server on this machine."""
    from ...engine.base.device import choose_device

    return "cuda:0" if choose_device("auto").type == "cuda" else "cpu"
