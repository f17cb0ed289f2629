"""Report of one run: its template filled, with the verdict and the figures, and the text of the console.

The console has the table of `vllm bench serve` to the letter (50 columns, label in 40, two decimals):
dashboards and scripts read its labels.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..load.certify import ClientError
from ..metrics.metrics import METRICS, percentile_word
from ..metrics.trace import LoadPass
from ..metrics.turns import window_sentence
from ..page.page import Page, ReportVerdict, number, percent
from ..quality.task_items import metric_name, score_words
from .figures import SHORT, captioned, run_figures, turns_svg
from .parts import load_words, report_page, warnings, write_page

LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL, per chunk",
    "token_gap": "ITL, per token",
    "e2el": "End to end",
    "client_queue_time": "Client queue",
    "ttft_from_schedule": "TTFT from schedule",
    "e2el_including_client_queue": "End to end from schedule",
}


def write_report(result: Mapping[str, Any], passes: Sequence[LoadPass], folder: Path) -> None:
    """`report.html`, `report.md` and one SVG file per figure, into an existing folder."""
    figures = run_figures(result, passes)
    write_page(run_page(result, figures), folder)


def run_page(result: Mapping[str, Any], figures: Mapping[str, str]) -> Page:
    """The page of one run from its record and its figures."""
    drawn = dict(figures)
    if talks := result["llmopt"].get("conversations"):
        drawn["turns"] = turns_svg(talks["turns"])
    return report_page(
        "report/run.jinja",
        result=result,
        verdict=run_verdict(result),
        notes=warnings(result),
        figures=captioned(drawn),
        SHORT=SHORT,
        LATENCIES=LATENCIES,
        certificate=certificate,
        planned=planned,
        shell=shlex.join,
        window_words=window_sentence,
    )


def run_verdict(result: Mapping[str, Any]) -> ReportVerdict:
    """The run's result in one sentence."""
    if result["completed"] == 0:
        return ReportVerdict("bad", "No request succeeded.", "There is nothing to measure.")
    metrics = result["llmopt"]["metrics"]
    clauses = [f"Median request: first token after {number(metrics['ttft']['median'], 1)} ms"]
    tpot = metrics["tpot"]["median"]
    if tpot is not None:
        clauses.append(f"then one token every {number(tpot, 2)} ms")
    rate = f"{number(result['output_throughput'], 0)} output tokens/s"
    if not result["total_output_tokens"]:  # embeddings, rerank
        clauses = [f"Median request: {number(metrics['e2el']['median'], 1)} ms"]
        rate = f"{number(result['request_throughput'], 1)} requests/s"
    headline = f"{rate} under a {load_words(result['llmopt']['identity']['load'])}"
    if result["llmopt"]["interrupted"]:
        return ReportVerdict("unsure", "Interrupted: " + headline, "Only what finished is counted.")
    if result["failed"]:
        share = result["failed"] / (result["failed"] + result["completed"])
        clauses.append(f"but {result['failed']} requests failed ({percent(share)})")
        return ReportVerdict("bad", headline, ", ".join(clauses) + ".")
    return ReportVerdict("plain", headline, ", ".join(clauses) + "; no request failed.")


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
