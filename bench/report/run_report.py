"""Report of one run: its template filled, with the verdict and the figures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..metrics.trace import LoadPass
from ..metrics.turns import window_sentence
from ..page.page import Page, ReportVerdict, number, percent
from .console import certificate, planned
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
