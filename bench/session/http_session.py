"""One benchmark of a server behind a URL, with the record of every other benchmark."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ...quant.model.models import bundled_models, load_tokenizer, resolve_model
from ..client.address import BACKENDS, CHAT, COMPLETIONS, Address, Body
from ..client.answer import Answer, chunk_tokens
from ..client.certify import ClientError, judge, measure_client
from ..client.fleet import Fleet, FleetPass, default_workers
from ..client.job import Exchange, Shot
from ..machine.energy import EnergyMeter, no_energy
from ..machine.environment import describe, machine_name
from ..machine.machine_load import CpuTimes, other_load
from ..machine.machine_state import machine_state
from ..metrics.cost import cost_part
from ..metrics.steady import steady_state
from ..metrics.trace import LoadPass, RequestTrace
from ..options.options import DEFAULT_CONCURRENCY, BenchOptions
from ..record import result as record
from ..record.identity import load_words
from ..record.result import BenchRun
from ..workloads.datasets import build_workload, settled, warmup_workload
from ..workloads.workload import Workload, WorkloadItem

DEFAULT_CONTEXT = 32768
TARGET = "http"


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the model behind a server, and the tokenizer of its prompts."""

    model: str
    tokenizer_name: str
    tokenizer: Any
    max_model_len: int


class HttpSession:
    """A server that is being measured pass by pass, with the same face as `session.BenchSession`.

    A context manager: leaving it ends the worker processes.

    Raises:
        BadInput: an option is unusable, the server names no model, or there is no tokenizer.
    """

    def __init__(
        self, options: BenchOptions, progress: Progress | None = None, *, arms: str | None = None
    ) -> None:
        self._progress = progress or Silent()
        self._arms = arms
        assert options.base_url is not None
        if options.plan is not None or options.slowdown != 1.0:
            raise BadInput(
                "--plan and --slowdown work on the engine of this process, not on a server"
            )
        self._address = Address.parse(
            options.base_url,
            backend=options.backend,
            endpoint=options.endpoint,
            api_key=options.api_key or os.environ.get("OPENAI_API_KEY"),
            headers=options.header,
            verify_tls=not options.insecure,
        )
        self._served = find_served(options, self._address)
        tokenizer = self._served.tokenizer
        self._workload = build_workload(options, tokenizer, self._served.max_model_len)
        self._options = options = settled(options, self._workload)
        self._body = Body(
            self._served.model,
            BACKENDS[options.backend],
            tokenizer.decode,
            options.ignore_eos,
            options.temperature,
            options.seed,
            tuple(options.extra_body.items()),
        )
        self._endpoint = self._address.endpoint(options.request_timeout)
        streams = options.concurrency or DEFAULT_CONCURRENCY
        self._num_workers = options.client_workers or default_workers(streams)
        self._first_tokens = first_tokens(tokenizer, options.num_runs + 1)
        self._passes: list[LoadPass] = []
        self._hit_rates: list[float | None] = []
        self._counters: Counter[str] = Counter()
        self._lags: list[dict[str, float]] = []
        self._late_connections = 0
        self._is_here = self._address.is_loopback
        device = local_gpu() if self._is_here else "cpu"
        self._energy = EnergyMeter(device)
        self._device = device
        self._state_before = machine_state(device)
        self._machine_loads: list[float | None] = []
        self._fleet = Fleet(self._num_workers)
        try:
            self._error = self._check_client(streams)
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HttpSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._fleet.__exit__()

    @property
    def name(self) -> str:
        return self._options.name or self._options.label or Path(self._served.model).name

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
        """Of each pass, the share of prompt tokens that the server's cache gave, where it says so."""
        return self._hit_rates

    @property
    def has_passes(self) -> bool:
        return bool(self._passes)

    def say_notes(self) -> None:
        """Tell the person what to know about the workload and what is not measured over HTTP."""
        for note in self._workload.notes:
            self._progress.note(f"{self._workload.name}: {note}")
        if self._options.quality:
            self._progress.note("quality is not scored over HTTP: it needs the model's logits")

    def run_pass(self) -> bool:
        """One more pass over the workload; False when it was interrupted."""
        number, count = len(self._passes) + 1, self._options.num_runs
        clock, helpers = CpuTimes.now(), self._fleet.cpu_seconds()
        self._energy.start()
        one, exchanges = self._drive(
            self._workload, f"{self.name}, pass {number} of {count}", self._first_tokens[number]
        )
        self._energy.stop()
        helpers = self._fleet.cpu_seconds() - helpers
        self._machine_loads.append(other_load(clock, CpuTimes.now(), helpers))
        prompts = [e.answer for e in exchanges if e.answer.cached_tokens is not None]
        tokens = sum(answer.prompt_tokens or 0 for answer in prompts)
        hits = sum(answer.cached_tokens or 0 for answer in prompts)
        self._passes.append(one)
        self._hit_rates.append(hits / tokens if tokens else None)
        return not one.interrupted

    def finish(self, *, interrupted: bool = False) -> BenchRun:
        """Put the record together, and say whether the client disturbed the run. Needs one pass."""
        options, passes, workload = self._options, self._passes, self._workload
        found = record.vllm_part(
            options,
            passes,
            model_id=self._served.model,
            tokenizer_id=self._served.tokenizer_name,
            backend=options.backend,
            date=datetime.now().strftime("%Y%m%d-%H%M%S"),
        )
        runs = [record.of_one_run(one) for one in passes]
        metrics = record.distributions(passes, options.seed)
        rates = [rate for rate in self._hit_rates if rate is not None]
        found["llmopt"] = {
            "schema": record.SCHEMA_VERSION,
            "run_id": uuid.uuid4().hex,
            "arms": self._arms,
            "name": self.name,
            "interrupted": interrupted or any(one.interrupted for one in passes),
            "slowdown": 1.0,
            "identity": self.identity(),
            "workload": record.workload_part(workload),
            "num_warmups": options.warmups,
            "num_runs": len(passes),
            "runs": [
                {
                    **run,
                    "prefix_cache_hit_rate": rate,
                    # Beside a server on this machine nobody can say what is it and what are others.
                    "other_load": None if self._is_here else load,
                    "client_machine_load": load,
                }
                for run, rate, load in zip(runs, self._hit_rates, self._machine_loads, strict=True)
            ],
            "metrics": metrics,
            "spread": record.spread(runs),
            "peaks": record.peaks(passes),
            "steady_state": steady_state(passes, options.concurrency),
            "client_lag_ms": record.client_lag(passes),
            "client": self._client(metrics),
            "server": {
                "url": self._address.url,
                "path": self._address.path,
                "max_model_len": self._served.max_model_len,
                "started": options.started_server,
            },
            "phases": None,
            "preemptions": None,
            "prefix_cache_hit_rate": sum(rates) / len(rates) if rates else None,
            "memory": dict.fromkeys(
                ("weight_bytes", "checkpoint_bytes", "kv_cache_bytes", "peak_resident_bytes")
            ),
            "quality": None,
            "roofline": None,
            "energy": self._energy.part(found["total_input_tokens"], found["total_output_tokens"])
            if self._is_here
            else no_energy("the server is on another machine"),
            "environment": {
                **describe(self._device),
                "before": self._state_before,
                "after": machine_state(self._device),
            },
        }
        if options.gpu_hour_price is not None:
            totals = (found[k] for k in ("duration", "total_input_tokens", "total_output_tokens"))
            found["llmopt"]["cost"] = cost_part(options.gpu_hour_price, *totals)
        return BenchRun(record.plain(found), passes)

    def identity(self) -> dict[str, Any]:
        """What is measured and how, as far as it is known from here."""
        options, workload = self._options, self._workload
        return {
            "model": self._served.model,
            "model_hash": "not known: it is behind a server",
            "quantization": None,
            "dtype": "not known",
            "target": TARGET,
            "workload": workload.name,
            "workload_sha256": workload.sha256,
            "load": load_words(options, workload),
            "engine": {
                "backend": CHAT if BACKENDS[options.backend] == CHAT else COMPLETIONS,
                "path": self._address.path,
                "client_workers": self._num_workers,
                "extra_body": options.extra_body or None,
            },
            "device": "behind a server",
            "machine": f"client: {machine_name('cpu')}",
        }

    def _client(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """What the client did to the numbers."""
        lag = {
            "mean": float(np.mean([one["mean"] for one in self._lags])),
            "p99": max(one["p99"] for one in self._lags),
            "max": max(one["max"] for one in self._lags),
        }
        late = None
        if self._options.concurrency is None:
            late = float(
                np.median([t.queued * 1000 for one in self._passes for t in one.traces] or [0])
            )
        reasons = judge(self._error, metrics, loop_lag_ms=lag["mean"], send_lag_ms=late)
        error = self._error
        return {
            "certified": not reasons,
            "reasons": reasons,
            "workers": self._num_workers,
            "client_ttft_error_ms": error.client_ttft_error_ms if error else None,
            "client_itl_error_ms": error.client_itl_error_ms if error else None,
            "check": error.as_dict() if error else None,
            "loop_lag_ms": lag,
            "late_connections": self._late_connections,
            "burden_ms": self._options.client_burden_ms,
            "request_timeout_s": self._options.request_timeout,
            "token_counts_by": dict(self._counters),
            "first_token_of_pass": self._first_tokens,
        }

    def _check_client(self, streams: int) -> ClientError | None:
        if not self._options.check_client:
            return None
        return measure_client(
            self._fleet,
            self._num_workers,
            streams,
            burden=self._options.client_burden_ms / 1000,
            progress=self._progress,
        )

    def _warm_up(self) -> None:
        options = self._options
        warmup = warmup_workload(
            self._workload, options.warmups, self._served.tokenizer, seed=options.seed
        )
        if warmup is not None:
            one, _ = self._drive(warmup, f"{self.name}, warm-up", self._first_tokens[0])
            if one.interrupted:
                raise KeyboardInterrupt
            # What the warm-up showed of the client is no part of the run.
            self._counters.clear()
            self._lags.clear()
            self._late_connections = 0

    def _drive(
        self, workload: Workload, description: str, first_token: int
    ) -> tuple[LoadPass, list[Exchange]]:
        shots = [self._shot(item, first_token) for item in workload.items]
        seen = self._fleet.run(
            self._endpoint,
            shots,
            self._options.concurrency,
            burden=self._options.client_burden_ms / 1000,
            progress=self._progress,
            description=description,
        )
        self._lags.append(seen.lag_ms)
        self._late_connections += seen.late_connections
        return self._load_pass(workload, seen), seen.exchanges

    def _shot(self, item: WorkloadItem, first_token: int) -> Shot:
        # A server's prefix cache cannot be emptied from here. Another first token makes every prompt
        # of a pass new to it; what the prompts of a pass share among themselves stays shared.
        prompt = (first_token, *item.prompt_token_ids[1:])
        return Shot(
            item.request_id, self._body.encode(prompt, item.output_len), item.arrival_seconds
        )

    def _load_pass(self, workload: Workload, seen: FleetPass) -> LoadPass:
        by_id = {exchange.request_id: exchange for exchange in seen.exchanges}
        traces = [
            self._trace(item, by_id[item.request_id], seen.origin)
            for item in workload.items
            if item.request_id in by_id
        ]
        began_at = time.time() - (time.perf_counter() - seen.origin)
        return LoadPass(traces, seen.ended - seen.origin, [], seen.interrupted, began_at)

    def _trace(self, item: WorkloadItem, exchange: Exchange, origin: float) -> RequestTrace:
        answer = exchange.answer
        tokens, source = chunk_tokens(answer, self._recount(answer))
        if not answer.error:
            self._counters[source] += 1
        trace = RequestTrace(
            item.request_id,
            answer.prompt_tokens or len(item.prompt_token_ids),
            item.output_len,
            scheduled=item.arrival_seconds,
            sent=exchange.sent - origin,
            chunk_times=[time - origin for time in answer.times],
            chunk_tokens=tokens,
            text=answer.text,
            cached_tokens=answer.cached_tokens or 0,
        )
        trace.error = answer.error or ("" if trace.output_len else "it ended without a token")
        trace.success = not trace.error
        return trace

    def _recount(self, answer: Answer) -> int | None:
        if answer.total is not None or not answer.times:
            return None
        return len(self._served.tokenizer.encode(answer.text, add_special_tokens=False))


def local_gpu() -> str:
    """The device whose counters and clocks stand for a server on this machine."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def find_served(options: BenchOptions, address: Address) -> Served:
    """The model to ask for and the tokenizer for its prompts.

    Raises:
        BadInput: no `--model` and a server that does not list one, or no tokenizer under any of its names.
    """
    card: dict[str, Any] = {}
    try:
        card = address.model_card()
    except BadInput:
        # With everything given, what is wrong with the server shows in the requests, and is counted.
        if options.model is None:
            raise
    model = options.model or card["id"]
    names = [options.tokenizer] if options.tokenizer else [model, card.get("root")]
    tokenizer_name, folder = find_tokenizer([name for name in names if name], options)
    limit = options.max_model_len or card.get("max_model_len")
    return Served(model, tokenizer_name, load_tokenizer(folder), limit or DEFAULT_CONTEXT)


def find_tokenizer(names: Sequence[str], options: BenchOptions) -> tuple[str, Path]:
    """(name, folder) of the first of `names` that is a model here. Only a name that the person gave may
    be looked for on the hub; what a server says is looked for on this machine."""
    for name in names:
        given = name in (options.tokenizer, options.model)
        is_here = name in bundled_models() or (Path(name).expanduser() / "config.json").is_file()
        if is_here or (given and (options.tokenizer or "/" in name)):
            return name, resolve_model(name)
    raise BadInput(
        f"no tokenizer for {' or '.join(map(repr, names))}: give --tokenizer FOLDER, a bundled model or a "
        "hub id"
    )


def first_tokens(tokenizer: Any, count: int) -> list[int]:
    """`count` different ordinary token ids. Drawn anew in every run, and recorded: with the seed's they
    would be in the cache of a server that has seen this benchmark before."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    return random.SystemRandom().sample(ordinary, count)


def run_http_bench(options: BenchOptions, progress: Progress | None = None) -> BenchRun:
    """Measure the server at `options.base_url`. Nothing is written.

    Raises:
        BadInput: an option is unusable, the server names no model, or there is no tokenizer.
    """
    with HttpSession(options, progress) as session:
        session.say_notes()
        for _ in range(options.num_runs):
            if not session.run_pass():
                break
        return session.finish()
