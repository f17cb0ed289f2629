"""HTTP benchmark session: a server driven by worker processes, with the client certified."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.progress import Progress
from ..load.address import BACKENDS, CHAT, COMPLETIONS, Address, find_served, server_facts
from ..load.driver import HttpDriver
from ..load.server_metrics import Scraper, pass_metrics, server_metrics_part
from ..machine.environment import hardware_facts, machine_name
from ..machine.machine_meter import MachineMeter
from ..machine.pass_usage import PassMeter
from ..metrics.run_statistics import silent_failures
from ..options.options import DEFAULT_CONCURRENCY, BenchOptions
from ..record.identity import conversations_part, identity_part
from ..record.run_record import MeasuredPass, Measurement, TargetFacts
from ..workloads.datasets import build_workload, resolved_options
from ..workloads.workload import shared_tokens
from .quality import ScoredQuality, score_served
from .session import LOAD, QUALITY, BenchSession
from .task_backends import ServedBackend
from .tasks import check_template, prepare_tasks

TARGET = "http"
ELSEWHERE = "the server is on another machine"


class HttpSession(BenchSession):
    """A server measured pass by pass. Leaving the session ends the worker processes.

    Raises:
        BadInput: an option is invalid, the server names no model, or there is no tokenizer.
    """

    def __init__(
        self,
        options: BenchOptions,
        progress: Progress | None = None,
        *,
        paired_runs: str | None = None,
    ) -> None:
        tasks = prepare_tasks(options.tasks, options) if options.tasks else None
        address = self._address = server_address(options)
        served = self._served = find_served(options, address)
        self._said = server_facts(address)
        if tasks is not None:
            check_template(options, self._task_backend(options, progress))
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
        super().__init__(options, name, workload, machine, progress, paired_runs, tasks)
        self._scraper = Scraper(address)
        self._driver = HttpDriver(options, address, served, self._progress)
        try:
            if options.check_client:
                self._progress.begin(LOAD, "measuring the client's own error")
                self._driver.check()
            # A pooling request holds several items, a rerank a query besides.
            each = options.random_batch_size + 1 if options.is_pooling else 1
            self._warm_up(options.warmups * each, served.tokenizer, self._driver.warm_up)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the worker processes."""
        self._scraper.stop()
        self._driver.close()

    def say_notes(self) -> None:
        """Print notes on the workload, and why there are no server metrics."""
        super().say_notes()
        if self._scraper.reason is not None:
            self._progress.note(f"no server metrics: {self._scraper.reason}")

    def identity(self) -> dict[str, Any]:
        """The identity, as far as the client knows it and the server says it."""
        identity = identity_part(
            self._options,
            self.workload,
            model=self._served.model,
            model_hash="not known: it is behind a server",
            quantization=None,
            dtype="not known",
            target=TARGET,
            engine={
                "backend": self._request_format(),
                "path": self._address.path,
                "client_workers": self._driver.num_workers,
                "extra_body": self._options.extra_body or None,
                **self._unusual(),
            },
            device="behind a server",
            machine=f"client: {machine_name('cpu')}",
            hardware=self._hardware(),
        )
        return {**identity, "server": self._server()}

    def _hardware(self) -> dict[str, Any]:
        """This machine's if the server was started here, else the GPU as given or as the server says."""
        if self._options.started_server is not None:
            return hardware_facts(local_gpu())
        return {"gpu": self._options.server_gpu or self._said["gpu"]}

    def _server(self) -> dict[str, Any]:
        started = self._options.started_server or {}
        version = self._said["version"] or started.get("version")
        return {"model": self._said["model"], "version": version}

    def _facts(self, measured: Measurement) -> TargetFacts:
        of_passes = [each.server_metrics for each in measured.passes]
        server_metrics = server_metrics_part(self._scraper, of_passes)
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
        parts = {
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
        names = {"backend": self._options.backend, "tokenizer_id": self._served.tokenizer_name}
        return TargetFacts(self._served.model, parts, **names)

    def _score(self) -> None:
        """Score the served model and the tasks; what is missing is said in a note."""
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

    def _request_format(self) -> str:
        backend = BACKENDS[self._options.backend]
        return backend if backend == CHAT or self._options.is_pooling else COMPLETIONS

    def _unusual(self) -> dict[str, Any]:
        """Parts that only some loads have, so that older results stay comparable."""
        options = self._options
        parts: dict[str, Any] = {}
        if options.loras:
            parts |= {"lora": list(options.loras), "lora_assignment": options.lora_assignment}
        if options.is_pooling:
            parts["batch_size"] = options.random_batch_size
        return parts

    def _measure(self, number: int, description: str) -> MeasuredPass:
        self._scraper.start()
        self._machine.start()
        window = self._options.duration
        sent = self._driver.drive(self.workload, number, description, window)
        usage = self._machine.stop(sent.worker_seconds)
        of_server = pass_metrics(*self._scraper.stop())
        usage["client_machine_load"] = usage["other_load"]
        # With a server on this machine, its CPU use cannot be told from background load.
        if self._address.is_loopback:
            usage["other_load"] = None
        hit_rate = sent.prefix_cache_hit_rate
        if hit_rate is None and of_server is not None:
            hit_rate = of_server["prefix_cache_hit_rate"]
        return MeasuredPass(sent.load, hit_rate, usage, server_metrics=of_server)


def server_address(options: BenchOptions) -> Address:
    """The address of the server of `options`.

    Raises:
        BadInput: an address option is invalid, or an option applies only to in-process engines.
    """
    assert options.base_url is not None
    if options.plan is not None or options.slowdown != 1.0:
        raise BadInput("--plan and --slowdown work on the engine of this process, not on a server")
    return Address.parse(
        options.base_url,
        backend=options.backend,
        endpoint=options.endpoint,
        api_key=options.api_key or os.environ.get("OPENAI_API_KEY", "").strip(),
        headers=options.header,
        verify_tls=not options.insecure,
    )


def local_gpu() -> str:
    """The device whose counters and clocks are read for a server on this machine."""
    from ...engine.base.device import choose_device

    return "cuda:0" if choose_device("auto").type == "cuda" else "cpu"
