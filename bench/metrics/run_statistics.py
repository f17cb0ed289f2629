"""Statistics over the passes of a run: distributions, spread between passes, peaks, lags, phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from . import statistics
from .metrics import aggregate, exact_peaks, samples, slo_share, summary
from .trace import LoadPass

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
