"""The top level of a record: the keys of `vllm bench serve`, their types and their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ..metrics.metrics import aggregate, parse_goodput
from ..metrics.trace import LoadPass, RequestTrace
from ..options.options import BenchOptions
from ..workloads.workload import ramp_rates


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
        goodput_ms=parse_goodput(options.goodput),
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
