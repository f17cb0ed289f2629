"""Latency tables of a run: percentiles, their intervals, spread between passes, steady state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..page.page import Table, bounds, interval, number, percent
from .plots import SHORT


def latency_tables(result: Mapping[str, Any]) -> list[Table]:
    """Latencies, their spread between passes, and the steady state, if any."""
    record = result["llmopt"]
    tables = [latency_table(record), percentile_table(record), spread_table(record)]
    if steady := record.get("steady_state"):
        tables.append(steady_table(result, steady))
    if lora := record.get("lora"):
        tables.append(adapter_table(lora))
    return tables


def adapter_table(lora: Mapping[str, Any]) -> Table:
    """The requests of each LoRA adapter."""
    header = ["adapter", "requests", "failed", "output tokens", "TTFT ms", "TPOT ms", "E2E ms"]
    rows = [
        [
            name,
            f"{figures['requests']:,}",
            f"{figures['failed']:,}",
            f"{figures['output_tokens']:,}",
            *(number(figures[f"median_{metric}_ms"]) for metric in ("ttft", "tpot", "e2el")),
        ]
        for name, figures in lora["by_adapter"].items()
    ]
    return Table(header, rows, caption=f"Adapters by {lora['assignment']}; times are medians.")


def steady_table(result: Mapping[str, Any], steady: Mapping[str, Any]) -> Table:
    """The steady state beside the whole run, ramp and drain included."""
    metrics = result["llmopt"]["metrics"]
    window = sum(one["duration_s"] for one in steady["windows"])
    short = [one for one in steady["windows"] if one["warning"]]
    rows = [
        [name, number(result[key]), number(steady[key])]
        for name, key in (
            ("Requests/s", "request_throughput"),
            ("Output tokens/s", "output_throughput"),
            ("All tokens/s", "total_token_throughput"),
        )
    ]
    rows += [
        [f"Median {SHORT[m]}, ms", number(metrics[m]["median"]), number(steady[f"median_{m}_ms"])]
        for m in ("ttft", "tpot", "itl", "e2el")
    ]
    caption = (
        f"Steady: with at least {steady['windows'][0]['threshold_abs']} requests in flight, "
        f"{window:.1f} s of {result['duration']:.1f} s."
    )
    if short:
        caption += " Its windows are shorter than 10 s or a tenth of a pass: read them as a hint."
    return Table(["", "whole run", "steady state"], rows, caption=caption)


def latency_table(record: Mapping[str, Any]) -> Table:
    """Every metric with its percentiles and the interval of its mean."""
    names = {
        "ttft": "TTFT",
        "tpot": "TPOT",
        "itl": "ITL, per chunk",
        "token_gap": "ITL, per token",
        "e2el": "End to end",
        "client_queue_time": "Client queue",
        "ttft_from_schedule": "TTFT from schedule",
        "e2el_including_client_queue": "End to end from schedule",
    }
    rows = []
    for metric, name in names.items():
        statistics = record["metrics"][metric]
        if not statistics["count"]:
            continue
        rows.append(
            [
                name,
                *(
                    number(statistics[key])
                    for key in ("mean", "median", "p90", "p95", "p99", "std")
                ),
                interval(statistics["interval_95"]["mean"]),
                f"{statistics['count']:,}",
            ]
        )
    header = ["ms", "mean", "median", "p90", "p95", "p99", "std", "95 % interval of the mean", "n"]
    return Table(header, rows)


def percentile_table(record: Mapping[str, Any]) -> Table:
    """Confidence intervals of the percentiles."""
    return Table(
        ["ms", "p50", "p90", "p95", "p99"],
        percentile_rows(record),
        caption="95 % order-statistic intervals: two of the measured values that enclose the percentile "
        "whatever the distribution. Unbounded: there are too few requests to say.",
    )


def percentile_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Order-statistic intervals of the metrics with one value per request."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "End to end"}
    rows = []
    for metric, name in names.items():
        intervals = record["metrics"][metric].get("order_interval_95")
        if intervals and record["metrics"][metric]["count"]:
            rows.append([name, *(bounds(intervals[q]) for q in ("p50", "p90", "p95", "p99"))])
    return rows


def spread_table(record: Mapping[str, Any]) -> Table:
    """Spread between the passes, and the minimum detectable change."""
    names = {
        "output_throughput": "Output throughput",
        "median_ttft_ms": "Median TTFT",
        "median_tpot_ms": "Median TPOT",
        "median_e2el_ms": "Median end to end",
    }
    rows = []
    for key, name in names.items():
        if key not in record["spread"]:
            continue
        spread = record["spread"][key]
        values = ", ".join(number(run[key]) for run in record["runs"])
        cv = percent(spread["run_cv"]) + (" (assumed)" if spread["run_cv_is_assumed"] else "")
        mean = interval(spread.get("interval_95"))
        rows.append([name, values, mean, cv, percent(spread["smallest_visible_change"])])
    return Table(
        ["per pass", "values", "95 % interval of the mean", "CV", "smallest visible change"],
        rows,
        caption="CV: standard deviation over mean. "
        "Smallest visible change: what a comparison with an equal run would notice in four of "
        "five cases, (t₀.₉₅ + t₀.₈) · CV · √(2 / passes).",
    )
