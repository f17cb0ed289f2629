"""Builder of run records: vLLM's keys on the top level, and the measurement with its target's facts below;
with the run's identity, which decides comparability."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.base.units import parse_slo
from ...engine.config.config import EngineConfig
from ...quant.source.models import open_checkpoint
from ..load.inprocess import InProcessTarget
from ..load.load import ROUND_ROBIN, lora_part
from ..machine.environment import checkpoint_hash, hardware_facts, machine_name
from ..machine.machine_meter import MachineMeter
from ..metrics.metrics import aggregate, slo_share, turn_figures, window_part
from ..metrics.run_statistics import (
    client_lag,
    cost_part,
    peaks,
    spread,
    steady_state,
    summarize_pass,
)
from ..metrics.trace import LoadPass, RequestTrace
from ..options.options import BenchOptions
from ..quality.positions import QualitySeries
from ..workloads.datasets import arrival_words
from ..workloads.workload import Workload, ramp_rates
from .result import SCHEMA_VERSION, BenchRun, plain

if TYPE_CHECKING:
    from ...engine.core.engine import Engine
    from ...engine.scheduling.outputs import EngineStats

# All keys under `llmopt`, in file order. Some kinds of target lack some of them.
_KEYS = (
    "schema run_id arms name interrupted slowdown slowdown_where identity model workload "
    "num_warmups num_runs conversations window failures runs rejected_passes metrics spread "
    "peaks slo lora steady_state client_lag_ms client silent_failures server server_metrics "
    "phases step_split step_trace preemptions speculation images prefix_cache_hit_rate memory "
    "quality quality_reason layer_errors tasks roofline energy environment cost plan"
)
KEYS = tuple(_KEYS.split())


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """One pass over the workload, with the session's measurements around it.

    Attributes:
        prefix_cache_hit_rate: fraction of prompt tokens from the prefix cache; None if not reported.
        usage: {key of the record: value}: background load, energy, and `machine.pass_usage.PassUsage`.
        preemptions: sequences preempted in the pass, where the target reports them.
    """

    load: LoadPass
    prefix_cache_hit_rate: float | None
    usage: Mapping[str, Any]
    preemptions: int = 0
    server_metrics: Mapping[str, Any] | None = None

    @property
    def disturbed(self) -> bool:
        return self.usage["disturbed"]


@dataclass(slots=True)
class Measurement:
    """The measurements common to all kinds of target.

    Attributes:
        names: vLLM's `model_id`; `tokenizer_id` and `backend` where they are not the model's and llmopt's.
        paired_runs: shared id of runs with interleaved passes.
        rejected: disturbed passes that were measured again, which enter nothing else.
    """

    options: BenchOptions
    name: str
    names: Mapping[str, str]
    workload: Workload
    machine: MachineMeter
    paired_runs: str | None = None
    passes: list[MeasuredPass] = field(default_factory=list)
    rejected: list[MeasuredPass] = field(default_factory=list)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def loads(self) -> list[LoadPass]:
        return [measured.load for measured in self.passes]

    @property
    def all_tokens(self) -> tuple[int, int]:
        prompt, output = zip(*(load.all_tokens for load in self.loads), strict=True)
        return sum(prompt), sum(output)

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        rates = [measured.prefix_cache_hit_rate for measured in self.passes]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else None


def build_run(
    measured: Measurement, facts: Mapping[str, Any], series: QualitySeries | None = None
) -> BenchRun:
    """The run with its record: vLLM's keys at the top level, llmopt's under `llmopt`, plain values only.
    `facts` are the parts that only this kind of target has."""
    options, loads = measured.options, measured.loads
    record = vllm_part(options, loads, measured.names, f"{datetime.now():%Y%m%d-%H%M%S}")
    errors = Counter(t.error for load in loads for t in load.traces if not t.success)
    rows = [{"error": error, "count": count} for error, count in errors.most_common(MOST_ERRORS)]
    parts = {
        "schema": SCHEMA_VERSION,
        "run_id": uuid.uuid4().hex,
        # The key is kept from older results.
        "arms": measured.paired_runs,
        "name": measured.name,
        "interrupted": measured.interrupted,
        "slowdown": options.slowdown,
        "workload": workload_part(measured.workload),
        **({"window": window_part(loads)} if options.duration is not None else {}),
        **({"failures": rows} if rows else {}),
        "num_warmups": options.warmups,
        "num_runs": len(measured.passes),
        **_pass_parts(measured),
        "energy": measured.machine.energy.part(*measured.all_tokens),
        "environment": measured.machine.environment(),
        **dict.fromkeys(("phases", "preemptions", "quality", "roofline")),
        **facts,
    }
    if (price := options.gpu_hour_price) is not None:
        tokens = record["total_input_tokens"], record["total_output_tokens"]
        parts["cost"] = cost_part(price, record["duration"], *tokens)
    assert parts.keys() <= set(KEYS), f"not in the record's order: {parts.keys() - set(KEYS)}"
    record["llmopt"] = {key: parts[key] for key in KEYS if key in parts}
    return BenchRun(plain(record), measured.loads, series)


def workload_part(workload: Workload) -> dict[str, Any]:
    keys = ("name", "source", "is_stand_in", "notes", "num_requests", "prompt_tokens")
    return {key: getattr(workload, key) for key in (*keys, "output_tokens")}


MOST_ERRORS = 5
"""Different errors that a record lists."""


def _pass_parts(measured: Measurement) -> dict[str, Any]:
    """Statistics per pass and over all passes."""
    loads = measured.loads
    limits = parse_slo(measured.options.goodput)
    summaries = [summarize_pass(load, limits) for load in loads]
    traces = [trace for load in loads for trace in load.traces]
    share = slo_share(traces, limits)
    return {
        "runs": [
            {
                **figures,
                "prefix_cache_hit_rate": own.prefix_cache_hit_rate,
                "joules_per_token": joules_per_token(own.usage["joules"], *own.load.all_tokens),
                **({"cancelled": own.load.cancelled} if own.load.cancelled else {}),
                **own.usage,
            }
            for figures, own in zip(summaries, measured.passes, strict=True)
        ],
        "rejected_passes": [
            {"duration": own.load.duration, **own.usage} for own in measured.rejected
        ],
        "metrics": measured.metrics,
        "spread": spread(summaries),
        "peaks": peaks(loads),
        "slo": (None if share is None else {"limits_ms": dict(limits), "share": share}),
        "lora": lora_part(loads, tuple(measured.options.loras), measured.options.lora_assignment),
        "steady_state": steady_state(loads, measured.options.concurrency),
        "client_lag_ms": client_lag(loads),
        "prefix_cache_hit_rate": measured.prefix_cache_hit_rate,
    }


def joules_per_token(joules: float | None, prompt_tokens: int, output_tokens: int) -> float | None:
    tokens = output_tokens or prompt_tokens
    return joules / tokens if joules is not None and tokens else None


def vllm_part(
    options: BenchOptions, passes: Sequence[LoadPass], names: Mapping[str, str], date: str
) -> dict[str, Any]:
    """The top level: the keys, types and order of `vllm bench serve`. Per-request arrays (seconds) only with
    `save_detailed`. A rate without limit is the text "inf"."""
    record: dict[str, Any] = {
        "date": date,
        "endpoint_type": names.get("backend", "llmopt"),
        "backend": names.get("backend", "llmopt"),
        "label": options.label,
        "model_id": names["model_id"],
        "tokenizer_id": names.get("tokenizer_id", names["model_id"]),
        "num_prompts": options.num_prompts * options.num_runs,
        **options.metadata,
        "request_rate": options.rate if math.isfinite(options.rate) else "inf",
        "burstiness": options.burstiness if math.isfinite(options.burstiness) else "inf",
        "max_concurrency": options.concurrency,
    }
    if options.ramp_up_strategy is not None:
        record |= {
            "ramp_up_strategy": options.ramp_up_strategy,
            "ramp_up_start_rps": options.ramp_up_start_rps,
            "ramp_up_end_rps": options.ramp_up_end_rps,
            "rps_change_events": rps_change_events(options, passes),
        }
    record |= aggregate(
        passes,
        metrics=options.reported_metrics,
        percentiles=options.metric_percentiles,
        goodput_ms=parse_slo(options.goodput),
    )
    if options.save_detailed:
        record |= detailed([trace for load_pass in passes for trace in load_pass.traces])
    return record


def rps_change_events(options: BenchOptions, passes: Sequence[LoadPass]) -> list[dict[str, Any]]:
    """`rps_change_events` of vLLM: the wall-clock times of the start of a ramp and of the first request at
    each whole rate. A falling ramp has only the start event."""
    strategy, first = options.ramp_up_strategy, options.ramp_up_start_rps
    if strategy is None or first is None or (last := options.ramp_up_end_rps) is None:
        return []
    rates = ramp_rates(options.num_prompts, strategy, first, last)
    events: list[dict[str, Any]] = []
    for load_pass in passes:
        events.append(_rps_event(load_pass, first, 0.0))
        reached = int(first)
        opening = [trace for trace in load_pass.traces if trace.turn == 0]
        ordered = sorted(opening, key=lambda trace: trace.scheduled)
        for rate, trace in zip(rates, ordered, strict=False):
            passed = range(reached + 1, int(rate) + 1)
            events += [_rps_event(load_pass, rps, trace.sent) for rps in passed]
            reached = max(reached, int(rate))
    return events


def _rps_event(load_pass: LoadPass, rps: float, seconds: float) -> dict[str, Any]:
    moment = datetime.fromtimestamp(load_pass.began_at + seconds).isoformat()
    return {"rps": rps, "timestamp": moment}


def detailed(traces: Sequence[RequestTrace]) -> dict[str, Any]:
    """vLLM's per-request arrays. A failed request has a length of 0 and times of 0, as there."""
    return {
        "input_lens": [t.prompt_len for t in traces],
        "output_lens": [t.output_len if t.success else 0 for t in traces],
        "start_times": [t.sent for t in traces],
        "ttfts": [t.ttft if t.success else 0.0 for t in traces],
        "latencies": [t.e2el if t.success else 0.0 for t in traces],
        "queue_times": [t.queued for t in traces],
        "itls": [t.itls if t.success else [] for t in traces],
        "generated_texts": [t.text for t in traces],
        "errors": [t.error for t in traces],
    }


IDENTITY = ("model", "model_hash", "quantization", "dtype", "target", "workload", "workload_sha256")
IDENTITY += ("load", "engine", "device", "machine", "hardware")
ALWAYS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "num_threads",
)
"""Options of the engine that every identity has; others only where they are set."""


def identity_part(options: BenchOptions, workload: Workload, **target: Any) -> dict[str, Any]:
    """`llmopt.identity`: what was measured and how, which decides whether two results are comparable.
    `target` holds the keys of `IDENTITY` that are not of the workload."""
    part = {"workload": workload.name, "workload_sha256": workload.sha256}
    known = {**target, **part, "load": load_words(options, workload)}
    return {key: known[key] for key in IDENTITY}


def engine_identity(
    options: BenchOptions, engine: Engine, model: Path, workload: Workload
) -> dict[str, Any]:
    quantization = open_checkpoint(model).quantization_config
    overlaps = engine.config.overlaps(engine.device.type)  # which depends on the device by default
    return identity_part(
        options,
        workload,
        model=options.model or model.name,
        model_hash=checkpoint_hash(model),
        quantization=quantization.get("quant_method") if quantization else None,
        dtype=str(engine.dtype).removeprefix("torch."),
        target=InProcessTarget.name,
        engine={
            "max_model_len": engine.max_model_len,
            **{name: getattr(options, name) for name in ALWAYS},
            **({"cpu_activations": 8} if engine.activation_bits == 8 else {}),
            **({"overlapped_loop": True} if overlaps else {}),
            **_unusual(options),
        },
        device=str(engine.device),
        machine=machine_name(str(engine.device)),
        hardware=hardware_facts(str(engine.device)),
    )


def load_words(options: BenchOptions, workload: Workload) -> dict[str, Any]:
    """The load settings: requests, arrivals, sampling."""
    return {
        "num_prompts": options.num_prompts,
        "request_rate": options.rate if options.request_rate else "inf",
        "burstiness": options.burstiness,
        **arrival_words(options, workload),
        "max_concurrency": options.concurrency,
        **({"duration": options.duration} if options.duration is not None else {}),
        **conversation_words(workload),
        "ignore_eos": options.ignore_eos,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def _unusual(options: BenchOptions) -> dict[str, Any]:
    """Engine options with non-default values only, so that older results stay comparable."""
    later = ("tensor_parallel_size", "scheduling_policy", "enforce_eager", "prefill_chunk_size")
    later += ("swap_space_bytes", "kv_cache_dtype", "window", "attention_sinks", "kv_budget")
    engine, usual = options.engine, EngineConfig()
    values = {name: getattr(engine, name) for name in (*later, "kv_eviction")}
    options_set = {name: value for name, value in values.items() if value != getattr(usual, name)}
    if options.loras:
        options_set["lora"] = list(options.loras)
        if options.lora_assignment != ROUND_ROBIN:
            options_set["lora_assignment"] = options.lora_assignment
    if options.speculation is not None:
        options_set["speculation"] = asdict(options.speculation)
    return options_set


def speculation_part(options: BenchOptions, stats: EngineStats) -> dict[str, Any] | None:
    """Speculative-decoding statistics; None without speculation."""
    if options.speculation is None:
        return None
    return {
        "method": options.speculation.method,
        "num_guesses": stats.num_draft_tokens,
        "num_accepted": stats.num_accepted_tokens,
        "acceptance": stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
    }


def conversations_part(
    passes: Sequence[LoadPass], workload: Workload, block_size: int | None
) -> dict[str, Any]:
    """`{"conversations": …}` for the record; empty for a workload of single requests. `block_size` is that of
    an engine in this process with prefix caching, else None."""
    if not workload.is_multi_turn:
        return {}
    part = {"num_conversations": len(workload.items), **conversation_words(workload)}
    return {"conversations": part | turn_figures(passes, block_size)}


def conversation_words(workload: Workload) -> dict[str, Any]:
    """History and think time of conversations; empty for a workload of single requests."""
    if not workload.is_multi_turn:
        return {}
    return {"history": workload.history, "mean_think_seconds": workload.mean_think_seconds}
