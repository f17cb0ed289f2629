"""The one record of a run: vLLM's keys on top, ours under `llmopt`, strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...quant.base.errors import BadInput
from ..metrics import statistics
from ..metrics.metrics import aggregate, exact_peaks, parse_goodput, samples, summary
from ..metrics.trace import LoadPass, RequestTrace
from ..options.options import BenchOptions
from ..workloads.arrivals import ramp_rates
from ..workloads.workload import Workload

SCHEMA_VERSION = 1
PERCENTILES = (50, 90, 95, 99)
RESULT_NAME = "result.json"
REQUESTS_NAME = "requests.parquet"
REQUESTS_CSV_NAME = "requests.csv"
# What a comparison decides on. Medians, because one stall of a shared machine must not carry a mean.
HEADLINES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
POOLED = ("itl", "token_gap")
RUN_METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class BenchRun:
    """A finished benchmark: its record and what it was made from."""

    result: dict[str, Any]
    passes: list[LoadPass]

    @property
    def interrupted(self) -> bool:
        return self.result["llmopt"]["interrupted"]


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
    traces = [trace for one in passes for trace in one.traces]
    found: dict[str, Any] = {
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
        found |= {
            "ramp_up_strategy": options.ramp_up_strategy,
            "ramp_up_start_rps": options.ramp_up_start_rps,
            "ramp_up_end_rps": options.ramp_up_end_rps,
            "rps_change_events": rps_change_events(options, passes),
        }
    found |= aggregate(
        passes,
        metrics=options.percentile_metrics,
        percentiles=options.metric_percentiles,
        goodput_ms=parse_goodput(options.goodput),
    )
    if options.save_detailed:
        found |= detailed(traces)
    return found


def rps_change_events(options: BenchOptions, passes: Sequence[LoadPass]) -> list[dict[str, Any]]:
    """When a ramp reached its next whole rate, by the wall clock: vLLM's record of it.

    The first event is the start; then one for every whole number of requests a second that the rate has
    climbed past, when the first request under it was sent. A falling ramp has no more than its start.
    """
    strategy, first, last = (
        options.ramp_up_strategy,
        options.ramp_up_start_rps,
        options.ramp_up_end_rps,
    )
    if strategy is None or first is None or last is None:
        return []
    rates = ramp_rates(options.num_prompts, strategy, first, last)
    found: list[dict[str, Any]] = []
    for one in passes:

        def event(rps: float, seconds: float, began_at: float = one.began_at) -> dict[str, Any]:
            moment = datetime.fromtimestamp(began_at + seconds).isoformat()
            return {"rps": rps, "timestamp": moment}

        found.append(event(first, 0.0))
        reached = int(first)
        ordered = sorted(one.traces, key=lambda trace: trace.scheduled)
        for rate, trace in zip(rates, ordered, strict=False):
            found += [event(rps, trace.sent) for rps in range(reached + 1, int(rate) + 1)]
            reached = max(reached, int(rate))
    return found


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


def workload_part(workload: Workload) -> dict[str, Any]:
    """What was sent, in numbers and words."""
    return {
        "name": workload.name,
        "source": workload.source,
        "is_stand_in": workload.is_stand_in,
        "notes": workload.notes,
        "num_requests": len(workload.items),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
    }


def of_one_run(one: LoadPass) -> dict[str, Any]:
    """The figures of one pass, for the spread between passes."""
    return aggregate([one], metrics=RUN_METRICS, percentiles=PERCENTILES)


def distributions(passes: Sequence[LoadPass], seed: int) -> dict[str, Any]:
    """Every metric's summary over all passes, with 95 % bootstrap intervals over requests."""
    traces = [trace for one in passes for trace in one.traces]
    by_request = [samples([trace]) for trace in traces if trace.success]
    found: dict[str, Any] = {}
    for metric, values in samples(traces).items():
        groups = [sample[metric] for sample in by_request if len(sample[metric])]
        found[metric] = {
            **summary(values, PERCENTILES),
            "count": len(values),
            "interval_95": {
                "mean": statistics.bootstrap_interval(groups, np.mean, seed=seed),
                "median": statistics.bootstrap_interval(groups, np.median, seed=seed),
                "p99": statistics.bootstrap_interval(
                    groups, partial(np.percentile, q=99), seed=seed
                ),
            },
            # Gaps of one request depend on each other, so theirs have no such interval.
            "order_interval_95": None
            if metric in POOLED
            else {f"p{q}": statistics.order_interval(values, q) for q in PERCENTILES},
        }
    return found


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per headline metric: coefficient of variation over the runs, and the smallest change that a
    comparison with an equal run could see."""
    found: dict[str, Any] = {}
    for key in HEADLINES:
        values = [run[key] for run in runs if run[key]]
        if not values:
            continue
        cv = statistics.run_cv(values)
        found[key] = {
            "run_cv": cv,
            "run_cv_is_assumed": len(values) < 2,
            "interval_95": statistics.mean_interval(values),
            "smallest_visible_change": statistics.smallest_visible_change(cv, len(values)),
        }
    return found


def client_lag(passes: Sequence[LoadPass]) -> dict[str, float | None]:
    """How late requests were sent after they were due and allowed, in milliseconds.

    Under a concurrency limit this is the wait for a free place, which is the load's own doing.
    """
    lag = np.asarray([trace.queued * 1000 for one in passes for trace in one.traces])
    found = summary(lag, (99,))
    return {**found, "max": float(lag.max()) if len(lag) else None}


def peaks(passes: Sequence[LoadPass]) -> dict[str, float]:
    """The largest of any pass of `metrics.exact_peaks`."""
    each = [exact_peaks(one.traces) for one in passes]
    return {key: max(one[key] for one in each) for key in each[0]}


def phases(passes: Sequence[LoadPass]) -> dict[str, float]:
    """Where the time of the passes went, in seconds: steps that only decode, steps that compute
    prompts (decoding beside them), and everything outside the steps."""
    steps = [step for one in passes for step in one.steps]
    decode = sum(step.seconds for step in steps if step.decode_only)
    prefill = sum(step.seconds for step in steps) - decode
    whole = sum(one.duration for one in passes)
    return {
        "decode_seconds": decode,
        "prefill_seconds": prefill,
        "between_steps_seconds": max(0.0, whole - decode - prefill),
        "num_steps": len(steps),
    }


def requests_table(passes: Sequence[LoadPass]) -> dict[str, list[Any]]:
    """One row a request: every time (seconds from the start of its pass) and every length."""
    rows: list[dict[str, Any]] = []
    for number, one in enumerate(passes):
        for t in one.traces:
            seen = bool(t.chunk_times)
            tpot = t.tpot if seen else None
            rows.append(
                {
                    "run": number,
                    "request_id": t.request_id,
                    "prompt_len": t.prompt_len,
                    "wanted_len": t.wanted_len,
                    "output_len": t.output_len,
                    "success": t.success,
                    "error": t.error,
                    "scheduled_s": t.scheduled,
                    "sent_s": t.sent,
                    "first_chunk_s": t.chunk_times[0] if seen else None,
                    "last_chunk_s": t.chunk_times[-1] if seen else None,
                    "ttft_ms": t.ttft * 1000 if seen else None,
                    "tpot_ms": tpot * 1000 if tpot is not None else None,
                    "e2el_ms": t.e2el * 1000 if seen else None,
                    "client_queue_ms": t.queued * 1000,
                    "cached_tokens": t.cached_tokens,
                    "chunk_times_s": list(t.chunk_times),
                    "chunk_tokens": list(t.chunk_tokens),
                    "text": t.text,
                }
            )
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def write_requests(path: Path, passes: Sequence[LoadPass]) -> None:
    """`requests.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(requests_table(passes)), path)


def write_requests_csv(path: Path, passes: Sequence[LoadPass]) -> None:
    """`requests.csv`: the columns of the Parquet table; lists are JSON, a missing value is empty."""
    import csv

    table = requests_table(passes)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(table)
        for row in zip(*table.values(), strict=True):
            writer.writerow([json.dumps(cell) if isinstance(cell, list) else cell for cell in row])


def to_json(value: Any) -> str:
    """Strict JSON text: NaN and infinities become null, numpy values become plain ones."""
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """The same value out of dicts, lists, text and finite numbers only."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value


def read_result(path: Path) -> dict[str, Any]:
    """A `result.json`, or the one in a run folder.

    Raises:
        BadInput: missing, not JSON, or not a result of ours.
    """
    from ...quant.model.checkpoint import read_json

    if path.is_dir():
        path = path / RESULT_NAME
    result = read_json(path)
    ours = result.get("llmopt")
    if not isinstance(ours, dict) or "identity" not in ours:
        raise BadInput(f"{path} is not a result of llmopt bench: it has no llmopt.identity")
    if ours.get("schema") != SCHEMA_VERSION:
        raise BadInput(
            f"{path} has result schema {ours.get('schema')!r}; this version reads {SCHEMA_VERSION}"
        )
    return result
