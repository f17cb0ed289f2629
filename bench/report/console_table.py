"""The table of `vllm bench serve`, to the letter: 50 columns, label in 40, two decimals.

Dashboards and scripts read these labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..metrics.metrics import METRICS, percentile_word
from ..tasks.items import metric_name, score_words

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
        title = f"lm-eval {tasks['lm_eval_version']}"
        lines.append(f"{title:-^{WIDTH}}")
        for row in tasks["metrics"]:
            lines.append(
                f"{row['task'] + ' ' + metric_name(row) + ':':<{LABEL}} {score_words(row)}"
            )
        if tasks["error"] is not None:
            lines.append(f"The tasks failed: {tasks['error']}")
    lines.append("=" * WIDTH)
    return "\n".join(line.rstrip() for line in lines)
