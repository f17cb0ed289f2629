"""Reports of one run, of a load sweep and of an SLO search: templates filled, and the text of the console.

The console has the table of `vllm bench serve` to the letter (50 columns, label in 40, two decimals):
dashboards and scripts read its labels. A sweep has every point, the knee, and throughput against latency.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..load.fleet import ClientError
from ..metrics.metrics import percentile_word, window_sentence
from ..metrics.names import METRICS
from ..metrics.run_statistics import STEADY_FORMULAS
from ..metrics.trace import LoadPass
from ..page.page import MISSING, Page, ReportTable, ReportVerdict, drawn, number, page_of, percent
from ..page.plot_style import BASE, MUTED, NEW, canvas, label, title, to_svg
from ..quality.task_items import metric_name, score_words
from ..quality.tool_calls import call_sentence
from ..record.result import atomic_run_folder, to_json
from .figures import SHORT, captioned, run_figures, turns_svg
from .parts import load_words, remarks, report_page, warnings, write_page

SHORTEST_FOR_PEAK = 3.0
"""Seconds of a pass below which the busiest whole second says nothing: most of them may be partly filled."""
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
    figures = run_figures(result, passes)
    write_page(run_page(result, figures), folder)


def run_page(result: Mapping[str, Any], figures: Mapping[str, str]) -> Page:
    drawn = dict(figures)
    if talks := result["llmopt"].get("conversations"):
        drawn["turns"] = turns_svg(talks["turns"])
    return report_page(
        "report/run.jinja",
        result=result,
        verdict=run_verdict(result),
        warnings=warnings(result),
        notes=remarks(result),
        figures=captioned(drawn),
        SHORT=SHORT,
        LATENCIES=LATENCIES,
        certificate=certificate,
        plan_table=plan_table,
        shell=shlex.join,
        window_words=window_sentence,
    )


def run_verdict(result: Mapping[str, Any]) -> ReportVerdict:
    reasons = failure_lines(result)
    if result["completed"] == 0:
        reason = reasons[0] if reasons else "There is nothing to measure."
        return ReportVerdict("bad", "No request succeeded.", reason)
    metrics = result["llmopt"]["metrics"]
    clauses = [f"Median request: first token after {number(metrics['ttft']['median'], 1)} ms"]
    tpot = metrics["tpot"]["median"]
    if tpot is not None:
        clauses.append(f"then one token every {number(tpot, 2)} ms")
    rate = f"{number(result['output_throughput'], 0)} output tokens/s"
    if not result["total_output_tokens"]:  # embeddings or scores
        clauses = [f"Median request: {number(metrics['e2el']['median'], 1)} ms"]
        rate = f"{number(result['request_throughput'], 1)} requests/s"
    headline = f"{rate} with {load_words(result['llmopt']['identity']['load'])}"
    if result["llmopt"]["interrupted"]:
        return ReportVerdict("unsure", "Interrupted: " + headline, "Only what finished is counted.")
    if result["failed"]:
        share = result["failed"] / (result["failed"] + result["completed"])
        clauses.append(f"but {result['failed']} requests failed ({percent(share)})")
        return ReportVerdict("bad", headline, " ".join([", ".join(clauses) + ".", *reasons[:1]]))
    return ReportVerdict("plain", headline, ", ".join(clauses) + "; no request failed.")


def failure_lines(result: Mapping[str, Any]) -> list[str]:
    """A line for each frequent error of the requests, most frequent first."""
    return [
        f"{row['count']} requests failed: {row['error']}"
        for row in result["llmopt"].get("failures") or ()
    ]


WIDTH, LABEL = 50, 40


def console_table(
    result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> str:
    """The lines that vLLM prints for a result; unmeasured values read `n/a`."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def count(label: str, value: Any) -> None:
        lines.append(f"{label:<{LABEL}} {value:<10}")

    def figure(label: str, value: float | None) -> None:
        count(label, "n/a" if value is None else f"{value:.2f}")

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
    passes = result.get("llmopt", {}).get("runs") or [result]
    if min(one_pass["duration"] for one_pass in passes) >= SHORTEST_FOR_PEAK:
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
            count(f"{row['task']} {metric_name(row)}:", score_words(row))
        if "tool_calls" in tasks:
            lines.append(call_sentence(tasks["tool_calls"]))
        if tasks["error"] is not None:
            lines.append(f"The tasks failed: {tasks['error']}")
    lines.append("=" * WIDTH)
    return "\n".join(line.rstrip() for line in lines)


def certificate(client: Mapping[str, Any]) -> str:
    """One sentence: certified, or the reasons against it."""
    if not client["certified"]:
        return f"Not certified: {'; '.join(client['reasons'])}."
    ttft, itl = client["client_ttft_error_ms"], client["client_itl_error_ms"]
    return (
        f"Certified: against a server of known latency at this concurrency the client's error was "
        f"{number(ttft['median'])} ms of TTFT and {number(itl['median'])} ms of ITL (medians)."
    )


def check_table(errors: Sequence[ClientError]) -> str:
    both = "median / p99"
    rows: list[tuple[Any, ...]] = [
        (
            "streams",
            "workers",
            "failed",
            "TTFT error ms",
            "ITL error ms",
            "server late ms",
            "loop lag ms",
        ),
        ("", "", "", both, both, "median", "p99"),
    ]
    for error in errors:
        pairs = [
            f"{number(figures['median'])} / {number(figures['p99'])}"
            for figures in (error.client_ttft_error_ms, error.client_itl_error_ms)
        ]
        late, lag = error.server_lateness_ms["median"], error.loop_lag_ms["p99"]
        counts = (error.streams, error.workers, error.failed)
        rows.append((*counts, *pairs, number(late), number(lag)))
    return "\n".join("{:>8} {:>8} {:>7} {:>24} {:>24} {:>15} {:>12}".format(*row) for row in rows)


def planned(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def plan_table(part: Mapping[str, Any]) -> ReportTable:
    """Predictions of a plan, with what was measured and the residual."""
    rows = []
    for row in part["rows"]:
        sides, moved = (planned(row[side]) for side in ("predicted", "measured")), row["residual"]
        residual = "-" if moved is None else percent(moved, signed=True)
        rows.append([f"{row['quantity']}, {row['unit']}", *sides, residual, row["load"]])
    return ReportTable(["against the plan", "predicted", "measured", "residual", "for"], rows)


SWEEP_NAME = "sweep.json"
UNITS = {"concurrency": "users", "rate": "requests/s"}


def write_sweep(record: Mapping[str, Any], target: Path) -> Path:
    """Write the folder `target` (`sweep.json`, reports, figures), atomically; returns it."""
    with atomic_run_folder(target) as folder:
        (folder / SWEEP_NAME).write_text(to_json(record), encoding="utf-8")
        write_page(sweep_page(record), folder)
    return target


def sweep_page(
    record: Mapping[str, Any],
    verdict: ReportVerdict | None = None,
    capacity: Mapping[str, Any] | None = None,
) -> Page:
    """The page of a sweep; with the plan of a `capacity` in front of it."""
    figures = {}
    if any(point["latency_ms"] for point in record["points"]):
        caption = "Every point is one load. Up is higher throughput, right is higher latency."
        svgs = {"throughput-latency": throughput_latency_svg(record)}
        figures = captioned(svgs, **{"throughput-latency": caption})
    return page_of(
        "report/sweep.jinja",
        verdict=verdict or sweep_verdict(record),
        units=UNITS[record["kind"]],
        capacity=capacity,
        sweep=record,
        figures=figures,
        points=points_table(record),
        knee=knee_point(record),
        STEADY_FORMULAS=STEADY_FORMULAS,
    )


def knee_point(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = record["kind"]
    return next((p for p in record["points"] if p[kind] == record["knee"]), None)


def load_text(value: float, kind: str) -> str:
    """`4 users`, `1 user`, `2.5 requests/s`."""
    if kind == "concurrency":
        return f"{value:.0f} {'user' if value == 1 else 'users'}"
    return f"{value:.3g} requests/s"


def sweep_verdict(record: Mapping[str, Any]) -> ReportVerdict:
    kind = record["kind"]
    if slo := record.get("slo"):
        limits = f"{slo['limits']} for {percent(slo['share'], 0)} of the requests"
        if slo["best"] is None:
            lowest = load_text(slo["lowest_failed"], kind)
            return ReportVerdict(
                "bad", f"Not even {lowest} keeps {limits}.", "No lighter load was tried."
            )
        best = load_text(slo["best"], kind)
        if slo["lowest_failed"] is None:
            sentence = "No heavier load was tried: this is the most that the workload can press."
        else:
            failed = next(p for p in record["points"] if p[kind] == slo["lowest_failed"])
            rate = number(failed["request_throughput"])
            why = f": {percent(failed['good_share'])} are within"
            if not failed["kept_up"]:
                why = f", it is not kept up with: {rate} requests/s of it completed"
                why += " (with more --num-prompts the drain counts for less)"
            sentence = f"{load_text(slo['lowest_failed'], kind)} does not{why}."
        return ReportVerdict("good", f"{best} keeps {limits}.", sentence)
    point = knee_point(record)
    if point is None:
        return ReportVerdict(
            "bad",
            "There is no knee: no load succeeded and was kept up with.",
            "Lower the loads, or give more prompts.",
        )
    most = max(p["output_throughput"] or 0.0 for p in record["points"])
    return ReportVerdict(
        "plain",
        f"The knee is at {load_text(record['knee'], kind)}: "
        f"{number(point['output_throughput'], 0)} output tokens/s.",
        f"The mean request takes {number(point['latency_ms'], 1)} ms there; the most of any load "
        f"was {number(most, 0)} output tokens/s.",
    )


def points_table(record: Mapping[str, Any]) -> ReportTable:
    """One row per load, lightest first; the knee is marked."""
    kind = record["kind"]
    limited = any(point["good_share"] is not None for point in record["points"])

    def load(point: Mapping[str, Any]) -> str:
        mark = "\u00a0*" if point[kind] == record["knee"] else ""
        return number(point[kind], 0 if kind == "concurrency" else 2) + mark

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "users" if kind == "concurrency" else "rate": load,
        "req/s": lambda p: number(p["request_throughput"]),
        "tok/s": lambda p: number(p["output_throughput"], 0),
        "steady tok/s": lambda p: number((p["steady_state"] or {}).get("output_throughput"), 0),
        "TTFT ms": lambda p: number(p["median_ttft_ms"], 1),
        "p99 TTFT": lambda p: number(p["p99_ttft_ms"], 1),
        "TPOT ms": lambda p: number(p["median_tpot_ms"]),
        "E2E ms": lambda p: number(p["latency_ms"], 1),
        "hits": lambda p: percent(p["prefix_cache_hit_rate"]),
        "failed": lambda p: str(p["failed"]),
    }
    if kind == "rate":
        columns["kept up"] = lambda p: "yes" if p["kept_up"] else "no"
    if limited:
        columns["within"] = lambda p: percent(p["good_share"], 0)
    cells = {name: [read(point) for point in record["points"]] for name, read in columns.items()}
    # Open loops have no steady state, and not every server reports cache hits.
    shown = {name: column for name, column in cells.items() if {*column} - {MISSING}}
    caption = "* is the knee. TTFT and TPOT are medians, E2E a mean; hits: of the prefix cache."
    return ReportTable(list(shown), list(zip(*shown.values(), strict=True)), caption)


@drawn
def throughput_latency_svg(record: Mapping[str, Any]) -> str:
    """Output throughput over mean latency, the loads in order joined by a line, the knee marked."""
    kind = record["kind"]
    figure, (axis,) = canvas(width=9, height=4.0)
    points = [p for p in record["points"] if p["latency_ms"] and p["output_throughput"]]
    across = [p["latency_ms"] for p in points]
    up = [p["output_throughput"] for p in points]
    axis.plot(across, up, "-o", color=BASE, linewidth=1.6, markersize=5)
    for point, x, y in zip(points, across, up, strict=True):
        at_knee = point[kind] == record["knee"]
        text = f"{point[kind]:.3g}" + (" knee" if at_knee else "")
        label(axis, text, (x, y), (6, -12), fontsize=9, color=NEW if at_knee else MUTED)
        if at_knee:
            axis.plot(x, y, "o", color=NEW, markersize=10)
    axis.set(xlabel="mean end-to-end latency, ms", ylabel="output tokens/s")
    axis.set(xlim=(0, None), ylim=(0, None))
    title(axis, f"Labels: {UNITS[kind]}")
    return to_svg(figure, "Output throughput against mean latency, one point per load")
