"""Console text of a benchmark: the table of `vllm bench serve`, the client's error, planned quantities.

vLLM's table is to the letter (50 columns, label in 40, two decimals): dashboards and scripts read its labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..load.certify import ClientError
from ..metrics.metrics import METRICS, percentile_word
from ..page.page import number
from ..quality.task_items import metric_name, score_words

WIDTH, LABEL = 50, 40


def console_table(
    result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> str:
    """The lines that vLLM prints for a result; what was not measured reads `n/a`."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def count(label: str, value: Any) -> None:
        lines.append(f"{label:<{LABEL}} {value:<10}")

    def figure(label: str, value: float | None) -> None:
        lines.append(f"{label:<{LABEL}} {'n/a' if value is None else f'{value:.2f}':<10}")

    count("Successful requests:", result["completed"])
    count("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        count("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        figure("Request rate configured (RPS):", result["request_rate"])
    figure("Benchmark duration (s):", result["duration"])
    count("Total input tokens:", result["total_input_tokens"])
    count("Total generated tokens:", result["total_output_tokens"])
    figure("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        figure("Request goodput (req/s):", result["request_goodput"])
    figure("Output token throughput (tok/s):", result["output_throughput"])
    figure("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    figure("Peak concurrent requests:", result["max_concurrent_requests"])
    figure("Total token throughput (tok/s):", result["total_token_throughput"])
    for metric in metrics:
        lines.append(f"{METRICS[metric]:-^{WIDTH}}")
        name = metric.upper() if metric in ("ttft", "tpot", "itl", "e2el") else METRICS[metric]
        figure(f"Mean {name} (ms):", result[f"mean_{metric}_ms"])
        figure(f"Median {name} (ms):", result[f"median_{metric}_ms"])
        for percentile in percentiles:
            word = percentile_word(percentile)
            figure(f"{word.upper()} {name} (ms):", result[f"{word}_{metric}_ms"])
    if tasks := result.get("llmopt", {}).get("tasks"):
        version = tasks["lm_eval_version"]
        title = "Tasks" if version is None else f"lm-eval {version}"
        lines.append(f"{title:-^{WIDTH}}")
        for row in tasks["metrics"]:
            lines.append(
                f"{row['task'] + ' ' + metric_name(row) + ':':<{LABEL}} {score_words(row)}"
            )
        if tasks["error"] is not None:
            lines.append(f"The tasks failed: {tasks['error']}")
    lines.append("=" * WIDTH)
    return "\n".join(line.rstrip() for line in lines)


def certificate(client: Mapping[str, Any]) -> str:
    """One sentence: certified or not, and why."""
    if not client["certified"]:
        return f"Not certified: {'; '.join(client['reasons'])}."
    ttft, itl = client["client_ttft_error_ms"], client["client_itl_error_ms"]
    return (
        f"Certified: against a server of known latency at this concurrency the client's error was "
        f"{number(ttft['median'])} ms of TTFT and {number(itl['median'])} ms of ITL (medians)."
    )


def check_table(errors: Sequence[ClientError]) -> str:
    """The client's error at several numbers of streams, as text."""
    header = (
        f"{'streams':>8} {'workers':>8} {'failed':>7} {'TTFT error ms':>24} {'ITL error ms':>24} "
        f"{'server late ms':>15} {'loop lag ms':>12}"
    )
    under = f"{'':>25} {'median / p99':>24} {'median / p99':>24} {'median':>15} {'p99':>12}"
    lines = [header, under]
    for one in errors:
        ttft, itl = one.client_ttft_error_ms, one.client_itl_error_ms
        lines.append(
            f"{one.streams:>8} {one.workers:>8} {one.failed:>7} "
            f"{number(ttft['median']) + ' / ' + number(ttft['p99']):>24} "
            f"{number(itl['median']) + ' / ' + number(itl['p99']):>24} "
            f"{number(one.server_lateness_ms['median']):>15} {number(one.loop_lag_ms['p99']):>12}"
        )
    return "\n".join(lines)


def planned(value: float | None) -> str:
    """A quantity of a plan as text."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
