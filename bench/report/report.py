"""Report of one run: verdict and key figures, then plots, tables and formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..load.step_split import split_sentence, split_table
from ..metrics.step_trace import step_trace_sentence
from ..metrics.trace import LoadPass
from ..metrics.turn_report import turn_section, window_sentence
from ..page.page import Card, Figure, Page, Section, Verdict, number, percent, size
from ..quality.sections import layer_sections, quality_sections
from .client_report import client_section, server_metrics_sections
from .formula_table import formula_table
from .latency_tables import latency_tables
from .money import money_sections
from .page_files import write_page
from .plan_residuals import plan_section
from .plots import CAPTIONS, SHORT, run_figures
from .result_tables import (
    environment_table,
    identity_table,
    pass_sections,
    quality_and_memory,
    roofline_table,
)
from .run_words import load_words, phase_sentence, subtitle, warnings


def write_report(result: Mapping[str, Any], passes: Sequence[LoadPass], folder: Path) -> None:
    """`report.html`, `report.md` and one SVG file per figure, into an existing folder."""
    figures = run_figures(result, passes)
    write_page(run_page(result, figures), folder)


def run_page(result: Mapping[str, Any], figures: Mapping[str, str]) -> Page:
    """The page of one run from its record and its figures."""
    record = result["llmopt"]
    found = [Figure(name, svg, CAPTIONS[name]) for name, svg in figures.items()]
    latency = [f for f in found if f.name == "distributions"]
    timeline = [f for f in found if f.name == "timeline"]
    steps = [f for f in found if f.name == "steps"]
    roof = [f for f in found if f.name == "roofline"]
    timeline_words = [phase_sentence(record)]
    if window := record.get("window"):
        timeline_words.append(f"{window_sentence(window)}.")
    sections = [
        Section("Latency", (), latency, latency_tables(result)),
        Section("Timeline", timeline_words, timeline),
    ]
    if conversations := record.get("conversations"):
        sections.append(turn_section(conversations))
    if steps:
        sections.append(Section("Steps", (step_trace_sentence(record["step_trace"]),), steps))
    if roof:
        words = [point["explanation"] for point in record["roofline"]["points"]]
        tables = [roofline_table({record["name"]: record["roofline"]})]
        if table := split_table({record["name"]: result}):
            tables.append(table)
            words.append(split_sentence(result) or "")
        sections.append(Section("Roofline", words, roof, tables))
    if plan := record.get("plan"):
        sections.append(plan_section(plan))
    sections += [
        client_section(record)
        if record.get("client")
        else Section("Quality and memory", (), (), quality_and_memory({record["name"]: result})),
        *quality_sections(record.get("quality")),
        *server_metrics_sections(record),
        *layer_sections({record["name"]: result}),
        *money_sections({record["name"]: result}),
        *pass_sections(result),
        Section("What was run", (), (), (identity_table(result),)),
        Section("How each number is made", (), (), (formula_table(),)),
        Section("Environment", (), (), (environment_table(record["environment"]),), folded=True),
    ]
    return Page(
        title=f"Benchmark of {record['name']}",
        subtitle=subtitle(result),
        verdict=run_verdict(result),
        cards=cards(result),
        sections=sections,
        warnings=warnings(result),
    )


def run_verdict(result: Mapping[str, Any]) -> Verdict:
    """The run's result in one sentence."""
    if result["completed"] == 0:
        return Verdict("bad", "No request succeeded.", "There is nothing to measure.")
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
        return Verdict("unsure", "Interrupted: " + headline, "Only what finished is counted.")
    if result["failed"]:
        share = result["failed"] / (result["failed"] + result["completed"])
        clauses.append(f"but {result['failed']} requests failed ({percent(share)})")
        return Verdict("bad", headline, ", ".join(clauses) + ".")
    return Verdict("plain", headline, ", ".join(clauses) + "; no request failed.")


def cards(result: Mapping[str, Any]) -> list[Card]:
    """The key figures of a run."""
    record = result["llmopt"]
    found = [
        Card("Output throughput", number(result["output_throughput"], 0), "tokens/s"),
        Card("Request throughput", number(result["request_throughput"], 2), "requests/s"),
    ]
    for metric in ("ttft", "tpot") if result["total_output_tokens"] else ("e2el",):
        statistics = record["metrics"][metric]
        found.append(
            Card(
                f"Median {SHORT[metric]}",
                number(statistics["median"], 2),
                "ms",
                f"p99 {number(statistics['p99'], 2)} ms",
            )
        )
    if result["request_goodput"] is not None:
        found.append(Card("Goodput", number(result["request_goodput"], 2), "requests/s"))
    if record["quality"]:
        scored = record["quality"]
        note = ""
        if scored["kl_nats"] is not None:
            note = f"KL {scored['kl_nats']:.4f} nats, top-1 {percent(scored['top1_agreement'])}"
        found.append(Card("Perplexity", number(scored["perplexity"], 3), "", note))
    memory = record["memory"]
    if client := record.get("client"):
        error = client["client_ttft_error_ms"]
        note = f"TTFT error {number(error['median'])} ms" if error else "not checked"
        found.append(Card("Client", "certified" if client["certified"] else "disturbed", "", note))
        return found
    found.append(
        Card(
            "Weights",
            size(memory["weight_bytes"]),
            "",
            f"KV cache {size(memory['kv_cache_bytes'])}",
        )
    )
    return found
