"""Statistics over the passes of a run: distributions, spread, peaks, phases, steady state, and cost.

The steady state is the window between the first and the last moment at full concurrency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from . import statistics
from .metrics import aggregate, exact_peaks, samples, slo_share, summary, vllm_keys
from .trace import LoadPass, RequestTrace

PERCENTILES = (50, 90, 95, 99)
# The metrics of the default gate. Medians, because one stall of a shared machine can dominate a mean.
HEADLINES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
POOLED = ("itl", "token_gap")
RUN_METRICS = ("ttft", "tpot", "itl", "e2el")


def summarize_pass(
    load_pass: LoadPass, limits_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The figures of one pass, for the spread between passes; `limits_ms` are those of `--goodput`."""
    figures = aggregate(
        [load_pass], metrics=RUN_METRICS, percentiles=PERCENTILES, goodput_ms=limits_ms
    )
    return {**figures, "slo_share": slo_share(load_pass.traces, limits_ms or {})}


def distributions(passes: Sequence[LoadPass], seed: int) -> dict[str, Any]:
    """Every metric's summary over all passes, with 95 % bootstrap intervals over requests."""
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    by_request = [samples([trace]) for trace in traces if trace.success]
    by_metric: dict[str, Any] = {}
    for metric, values in samples(traces).items():
        groups = [sample[metric] for sample in by_request if len(sample[metric])]
        by_metric[metric] = {
            **summary(values, PERCENTILES),
            "count": len(values),
            "interval_95": {
                "mean": statistics.bootstrap_interval(groups, np.mean, seed=seed),
                "median": statistics.bootstrap_interval(groups, np.median, seed=seed),
                "p99": statistics.bootstrap_interval(
                    groups, partial(np.percentile, q=99), seed=seed
                ),
            },
            # Gaps within a request are correlated, so pooled gaps have no order-statistic interval.
            "order_interval_95": None
            if metric in POOLED
            else {f"p{q}": statistics.order_interval(values, q) for q in PERCENTILES},
        }
    return by_metric


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per headline metric: coefficient of variation over the runs, and the smallest change detectable
    in a comparison with an equal run."""
    by_metric: dict[str, Any] = {}
    for key in HEADLINES:
        values = [run[key] for run in runs if run[key]]
        if not values:
            continue
        cv = statistics.run_cv(values)
        by_metric[key] = {
            "run_cv": cv,
            "run_cv_is_assumed": len(values) < 2,
            "interval_95": statistics.mean_interval(values),
            "smallest_visible_change": statistics.smallest_visible_change(cv, len(values)),
        }
    return by_metric


def client_lag(passes: Sequence[LoadPass]) -> dict[str, float | None]:
    """Lateness of sending, in milliseconds after a request was due.

    Under a concurrency limit this includes the wait for a permit, which is part of the load.
    """
    lag = np.asarray([trace.queued * 1000 for load_pass in passes for trace in load_pass.traces])
    return {**summary(lag, (99,)), "max": float(lag.max()) if len(lag) else None}


def peaks(passes: Sequence[LoadPass]) -> dict[str, float]:
    """`metrics.exact_peaks`, the maximum over passes."""
    each = [exact_peaks(load_pass.traces) for load_pass in passes]
    return {key: max(peak[key] for peak in each) for key in each[0]}


def phases(passes: Sequence[LoadPass]) -> dict[str, float]:
    """Seconds of all passes by phase: decode-only steps, steps with prefill, and time between steps."""
    steps = [step for load_pass in passes for step in load_pass.steps]
    decode = sum(step.seconds for step in steps if step.decode_only)
    prefill = sum(step.seconds for step in steps) - decode
    whole = sum(load_pass.duration for load_pass in passes)
    return {
        "decode_seconds": decode,
        "prefill_seconds": prefill,
        "between_steps_seconds": max(0.0, whole - decode - prefill),
        "num_steps": len(steps),
    }


THRESHOLD = 0.95
SHORTEST_SECONDS = 10.0
SHORTEST_SHARE = 0.1
STEADY_METRICS = ("ttft", "tpot", "itl", "e2el")
STEADY_PERCENTILES = (50, 90, 99)
STEADY_FORMULAS = {
    "steady_state": f"from the first to the last moment of a pass with at least {THRESHOLD} × "
    "max_concurrency requests in flight; throughput counts what completed, and the tokens that came, "
    "within it; latencies are those of the requests that were sent within it"
}


def window_of(traces: Sequence[RequestTrace], at_least: int) -> tuple[float, float] | None:
    """First and last moment (seconds of the pass) with `at_least` requests in flight, or None."""
    # At equal times, ends sort before starts: a freed slot may be reused at once.
    ends = [(t.chunk_times[-1], -1) for t in traces if t.chunk_times]
    events = sorted([(t.sent, 1) for t in traces if t.chunk_times] + ends)
    alive = 0
    first = last = None
    for time, change in events:
        if alive >= at_least:
            last = time
        alive += change
        if alive >= at_least and first is None:
            first = time
    return None if first is None or last is None or last <= first else (first, last)


def steady_state(passes: Sequence[LoadPass], max_concurrency: int | None) -> dict[str, Any] | None:
    """Throughput and latency within the steady-state windows of all passes, with the keys of vllm-bench.

    None without a concurrency limit, or where no pass reached it. A window that is too short to
    trust (under 10 s, or under a tenth of its pass) is reported with a warning.
    """
    if max_concurrency is None:
        return None
    at_least = math.ceil(THRESHOLD * max_concurrency)
    seconds = prompt_tokens = output_tokens = completed = 0.0
    windows: list[dict[str, Any]] = []
    started: list[RequestTrace] = []
    for number, load_pass in enumerate(passes):
        window = window_of(load_pass.traces, at_least)
        if window is None:
            continue
        start, end = window
        done = [t for t in load_pass.traces if t.success and start <= t.chunk_times[-1] <= end]
        sent = [t for t in load_pass.traces if start <= t.sent < end]
        seconds += end - start
        completed += len(done)
        prompt_tokens += sum(t.prompt_len for t in done)
        output_tokens += sum(
            count
            for t in load_pass.traces
            if t.success
            for time, count in zip(t.chunk_times, t.chunk_tokens, strict=True)
            if start <= time <= end
        )
        started += sent
        short = end - start < max(SHORTEST_SECONDS, SHORTEST_SHARE * load_pass.duration)
        windows.append(
            {
                "run": number,
                "start_s": start,
                "end_s": end,
                "duration_s": end - start,
                "target_concurrency": max_concurrency,
                "threshold": THRESHOLD,
                "threshold_abs": at_least,
                "requests_started_in_window": len(sent),
                "requests_completed_in_window": len(done),
                "requests_total": len(load_pass.traces),
                "warning": "shorter than 10 s or a tenth of the pass" if short else None,
            }
        )
    if not windows:
        return None
    result: dict[str, Any] = {
        "windows": windows,
        "request_throughput": completed / seconds,
        "input_throughput": prompt_tokens / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
    }
    sampled = samples(started)
    for metric in STEADY_METRICS:
        result |= vllm_keys(summary(sampled[metric], STEADY_PERCENTILES), metric)
    return result


SECONDS_PER_HOUR = 3600
COST_FORMULAS = {
    "usd": "duration of the passes · price of an hour / 3600",
    "usd_per_million_output_tokens": "the whole price over the generated tokens alone · 10⁶",
    "usd_per_million_input_tokens": "the whole price over the prompt tokens alone · 10⁶",
    "usd_per_million_total_tokens": "the whole price over prompt and generated tokens · 10⁶",
    "joules_per_million_output_tokens": "energy of sockets and GPU during the passes, all of it, over "
    "the generated tokens · 10⁶",
}


def cost_part(
    hour_price: float, seconds: float, input_tokens: int, output_tokens: int
) -> dict[str, Any]:
    """`llmopt.cost` of a result; a price per token is None where there is no such token."""
    usd = seconds * hour_price / SECONDS_PER_HOUR

    def per_million(tokens: int) -> float | None:
        return usd / tokens * 1e6 if tokens else None

    return {
        "hour_price": hour_price,
        "usd": usd,
        "usd_per_million_input_tokens": per_million(input_tokens),
        "usd_per_million_output_tokens": per_million(output_tokens),
        "usd_per_million_total_tokens": per_million(input_tokens + output_tokens),
    }
