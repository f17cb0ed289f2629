"""Builder of run records: vLLM's keys on the top level, and the measurement with its target's facts below."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...engine.base.units import parse_slo
from ..load.load import lora_part
from ..machine.machine_meter import MachineMeter
from ..metrics.metrics import aggregate, slo_share, window_part
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
from ..workloads.workload import Workload, ramp_rates
from .result import SCHEMA_VERSION, BenchRun, plain

# All keys under `llmopt`, in file order. Some kinds of target lack some of them.
KEYS = (
    "schema",
    "run_id",
    "arms",
    "name",
    "interrupted",
    "slowdown",
    "slowdown_where",
    "identity",
    "model",
    "workload",
    "num_warmups",
    "num_runs",
    "conversations",
    "window",
    "failures",
    "runs",
    "rejected_passes",
    "metrics",
    "spread",
    "peaks",
    "slo",
    "lora",
    "steady_state",
    "client_lag_ms",
    "client",
    "silent_failures",
    "server",
    "server_metrics",
    "phases",
    "step_split",
    "step_trace",
    "preemptions",
    "speculation",
    "images",
    "prefix_cache_hit_rate",
    "memory",
    "quality",
    "quality_reason",
    "layer_errors",
    "tasks",
    "roofline",
    "energy",
    "environment",
    "cost",
    "plan",
)


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """One pass over the workload, with the session's measurements around it.

    Attributes:
        prefix_cache_hit_rate: fraction of prompt tokens from the prefix cache; None where the target does
            not report it.
        usage: {key of the record: value}: background load, energy, and `machine.pass_usage.PassUsage`.
        preemptions: sequences preempted in the pass, where the target reports them.
        server_metrics: what `server.server_metrics.pass_metrics` made of the server's own metrics.
    """

    load: LoadPass
    prefix_cache_hit_rate: float | None
    usage: Mapping[str, Any]
    preemptions: int = 0
    server_metrics: Mapping[str, Any] | None = None

    @property
    def disturbed(self) -> bool:
        """Whether the pass is to be rejected by its own evidence."""
        return self.usage["disturbed"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements common to all kinds of target.

    Attributes:
        paired_runs: shared id of runs whose passes were interleaved; None for a single run.
        rejected: disturbed passes that were measured again, which enter nothing else.
        metrics: `run_statistics.distributions` over all passes.
    """

    options: BenchOptions
    name: str
    paired_runs: str | None
    workload: Workload
    passes: Sequence[MeasuredPass]
    rejected: Sequence[MeasuredPass]
    metrics: Mapping[str, Any]
    machine: MachineMeter
    interrupted: bool

    @property
    def loads(self) -> list[LoadPass]:
        """The passes as recorded by the load driver."""
        return [measured.load for measured in self.passes]

    @property
    def all_tokens(self) -> tuple[int, int]:
        """(prompt, output) tokens of all passes."""
        prompt, output = zip(*(load.all_tokens for load in self.loads), strict=True)
        return sum(prompt), sum(output)

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Mean over the passes where it is known."""
        rates = [measured.prefix_cache_hit_rate for measured in self.passes]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about the target, provided by its session.

    Attributes:
        model_id: for vLLM's key, as is `tokenizer_id`, which defaults to the model's.
        parts: keys and values of the record: `identity`, `memory`, and those of this kind of target.
    """

    model_id: str
    parts: Mapping[str, Any]
    backend: str = "llmopt"
    tokenizer_id: str | None = None


def build_run(
    measured: Measurement, target: TargetFacts, series: QualitySeries | None = None
) -> BenchRun:
    """The run with its record: vLLM's keys at the top level, llmopt's under `llmopt`, plain values only."""
    record = vllm_part(
        measured.options,
        measured.loads,
        model_id=target.model_id,
        tokenizer_id=target.tokenizer_id,
        backend=target.backend,
        date=datetime.now().strftime("%Y%m%d-%H%M%S"),
    )
    parts = {
        "schema": SCHEMA_VERSION,
        "run_id": uuid.uuid4().hex,
        **_load_parts(measured),
        **_pass_parts(measured),
        **_machine_parts(measured, record),
        **dict.fromkeys(("phases", "preemptions", "quality", "roofline")),
        **target.parts,
    }
    assert parts.keys() <= set(KEYS), f"not in the record's order: {parts.keys() - set(KEYS)}"
    record["llmopt"] = {key: parts[key] for key in KEYS if key in parts}
    return BenchRun(plain(record), measured.loads, series)


def workload_part(workload: Workload) -> dict[str, Any]:
    """`llmopt.workload`: source, counts, notes and hash of the requests."""
    return {
        "name": workload.name,
        "source": workload.source,
        "is_stand_in": workload.is_stand_in,
        "notes": workload.notes,
        "num_requests": workload.num_requests,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
    }


def _load_parts(measured: Measurement) -> dict[str, Any]:
    """Record parts on the workload and the overall outcome."""
    options = measured.options
    return {
        # The key is kept from older results.
        "arms": measured.paired_runs,
        "name": measured.name,
        "interrupted": measured.interrupted,
        "slowdown": options.slowdown,
        "workload": workload_part(measured.workload),
        **({"window": window_part(measured.loads)} if options.duration is not None else {}),
        **failures_part(measured.loads),
        "num_warmups": options.warmups,
        "num_runs": len(measured.passes),
    }


MOST_ERRORS = 5
"""Different errors that a record lists."""


def failures_part(loads: Sequence[LoadPass]) -> dict[str, Any]:
    """`llmopt.failures`: the most frequent errors with their counts, only where a request failed."""
    errors = Counter(t.error for load in loads for t in load.traces if not t.success)
    rows = [{"error": error, "count": count} for error, count in errors.most_common(MOST_ERRORS)]
    return {"failures": rows} if rows else {}


def _pass_parts(measured: Measurement) -> dict[str, Any]:
    """Statistics per pass and over all passes."""
    loads = measured.loads
    limits = parse_slo(measured.options.goodput)
    summaries = [summarize_pass(load, limits) for load in loads]
    return {
        "runs": [
            {
                **figures,
                "prefix_cache_hit_rate": one.prefix_cache_hit_rate,
                "joules_per_token": joules_per_token(one.usage["joules"], *one.load.all_tokens),
                **({"cancelled": one.load.cancelled} if one.load.cancelled else {}),
                **one.usage,
            }
            for figures, one in zip(summaries, measured.passes, strict=True)
        ],
        "rejected_passes": [
            {"duration": one.load.duration, **one.usage} for one in measured.rejected
        ],
        "metrics": measured.metrics,
        "spread": spread(summaries),
        "peaks": peaks(loads),
        "slo": slo_part(loads, limits),
        "lora": lora_part(loads, tuple(measured.options.loras), measured.options.lora_assignment),
        "steady_state": steady_state(loads, measured.options.concurrency),
        "client_lag_ms": client_lag(loads),
        "prefix_cache_hit_rate": measured.prefix_cache_hit_rate,
    }


def slo_part(loads: Sequence[LoadPass], limits_ms: Mapping[str, float]) -> dict[str, Any] | None:
    """`llmopt.slo`: the limits of `--goodput` and the share of requests that meets them; None without."""
    traces = [trace for load in loads for trace in load.traces]
    share = slo_share(traces, limits_ms)
    return None if share is None else {"limits_ms": dict(limits_ms), "share": share}


def joules_per_token(joules: float | None, prompt_tokens: int, output_tokens: int) -> float | None:
    """Energy per generated token; where nothing is generated (embeddings), per prompt token."""
    tokens = output_tokens or prompt_tokens
    return joules / tokens if joules is not None and tokens else None


def _machine_parts(measured: Measurement, totals: Mapping[str, Any]) -> dict[str, Any]:
    """Energy, environment and, with a price, cost."""
    tokens = totals["total_input_tokens"], totals["total_output_tokens"]
    parts = {
        "energy": measured.machine.energy(*measured.all_tokens),
        "environment": measured.machine.environment(),
    }
    if (price := measured.options.gpu_hour_price) is not None:
        parts["cost"] = cost_part(price, totals["duration"], *tokens)
    return parts


def vllm_part(
    options: BenchOptions,
    passes: Sequence[LoadPass],
    *,
    model_id: str,
    date: str,
    tokenizer_id: str | None = None,
    backend: str = "llmopt",
) -> dict[str, Any]:
    """The top level: the keys, types and order of `vllm bench serve`.

    Per-request arrays (seconds) only with `save_detailed`. A rate without limit is the text "inf".
    """
    record: dict[str, Any] = {
        "date": date,
        "endpoint_type": backend,
        "backend": backend,
        "label": options.label,
        "model_id": model_id,
        "tokenizer_id": tokenizer_id or model_id,
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
    """`rps_change_events` of vLLM: the wall-clock times at which a ramp reached each whole rate.

    The first event is the start; then one for every whole number of requests per second that the rate has
    passed, when the first request at it was sent. A falling ramp has only the start event.
    """
    strategy, first, last = (
        options.ramp_up_strategy,
        options.ramp_up_start_rps,
        options.ramp_up_end_rps,
    )
    if strategy is None or first is None or last is None:
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
