"""Report of several runs: one row each, and the Pareto front of quality against size and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...quant.base.errors import BadInput
from ..page.page import Figure, Page, Section, Table, Tone, Verdict, number, percent, size
from ..quality.sections import layer_sections
from ..record.comparable import incomparable, served_weight_bytes, widened_notes
from ..record.result import RunData
from .comparison_plots import bars_svg, latency_samples
from .formula_table import formula_table
from .money import money_sections
from .pareto import Candidate, front, pareto_svg
from .plots import CAPTIONS, distributions_svg, roofline_svg
from .result_tables import environment_table, identity_table, quality_and_memory, roofline_table
from .run_words import load_words, warnings

HEADER = ("run", "weights", "perplexity", "KL nats", "top-1", "tokens/s", "TTFT", "TPOT", "front")


def joined_page(runs: Sequence[RunData]) -> Page:
    """The page of two or more runs; differing loads or quality protocols are reported as warnings on top.

    Raises:
        BadInput: fewer than two runs.
    """
    if len(runs) < 2:
        raise BadInput("a joined report needs two runs or more: a single run has its report.html")
    named = unique_names(runs)
    results = {name: run.result for name, run in named.items()}
    candidates = {name: candidate(result) for name, result in results.items()}
    quality_name = shared_quality(candidates)
    best = front(candidates, quality_name)
    first, last = (runs[at].result["llmopt"] for at in (0, -1))
    return Page(
        title=f"{len(runs)} runs: {', '.join(results)}",
        subtitle=f"{first['identity']['workload']} · {load_words(first['identity']['load'])} · "
        f"{first['identity']['machine']}",
        verdict=joined_verdict(results, best, quality_name),
        cards=(),
        sections=[
            front_section(results, candidates, quality_name, best),
            latency_section(named),
            Section("Side by side", (), (Figure("side-by-side", bars_svg(results)),)),
            roofline_section(results),
            Section("Quality and memory", (), (), quality_and_memory(results)),
            *layer_sections(results),
            *money_sections(results),
            Section("How each number is made", (), (), (formula_table(),), folded=True),
            *(
                Section(f"What was run: {name}", (), (), (identity_table(result),), folded=True)
                for name, result in results.items()
            ),
            Section(
                "Environment of the last run",
                (),
                (),
                (environment_table(last["environment"]),),
                folded=True,
            ),
        ],
        warnings=differences(results),
    )


def front_section(
    results: Mapping[str, Mapping[str, Any]],
    candidates: Mapping[str, Candidate],
    quality_name: str | None,
    best: Sequence[str],
) -> Section:
    """The summary table, and the Pareto fronts where quality is comparable."""
    rows = [row(name, result, name in best) for name, result in results.items()]
    tones: dict[int, Tone] = {n: "good" for n, name in enumerate(results) if name in best}
    figures = []
    if quality_name is not None:
        figures = [
            Figure("pareto-size", pareto_svg(candidates, quality_name, "size"), half=True),
            Figure("pareto-speed", pareto_svg(candidates, quality_name, "speed"), half=True),
        ]
    table = Table(HEADER, rows, tones=tones)
    return Section("All runs", (), figures, (table,), tables_first=True)


def latency_section(named: Mapping[str, RunData]) -> Section:
    """Latency distributions of the runs with a request table."""
    samples = {name: latency_samples(run) for name, run in named.items() if run.requests}
    if not samples:
        return Section("Latency")
    caption = CAPTIONS["distributions"]
    return Section("Latency", (), [Figure("distributions", distributions_svg(samples), caption)])


def roofline_section(results: Mapping[str, Mapping[str, Any]]) -> Section:
    """Roofline of all runs, with the ceilings of the first run that has them."""
    roofs = {name: result["llmopt"]["roofline"] for name, result in results.items()}
    plotted = {name: roof for name, roof in roofs.items() if roof and roof["points"]}
    figures = []
    if plotted:
        figures.append(Figure("roofline", roofline_svg(plotted), CAPTIONS["roofline"]))
    return Section("Roofline", (), figures, (roofline_table(roofs),))


def unique_names(runs: Sequence[RunData]) -> dict[str, RunData]:
    """{name: run}; duplicate names are numbered."""
    named: dict[str, RunData] = {}
    for run in runs:
        name, count = run.name, 1
        while name in named:
            count += 1
            name = f"{run.name} ({count})"
        named[name] = run
    return named


def candidate(result: Mapping[str, Any]) -> Candidate:
    """The run as a point for the Pareto front."""
    record = result["llmopt"]
    scored = record["quality"] or {}
    return Candidate(
        served_weight_bytes(result),
        result["output_throughput"],
        scored.get("perplexity"),
        scored.get("kl_nats"),
        scored.get("token_sha256"),
    )


def shared_quality(candidates: Mapping[str, Candidate]) -> str | None:
    """The common quality metric: `kl` where all but one run (the reference) have it, `perplexity` where all
    have it on the same tokens, None where quality is not comparable."""
    every = list(candidates.values())
    if len({candidate_.tokens for candidate_ in every}) > 1 or any(
        candidate_.perplexity is None for candidate_ in every
    ):
        return None
    if len(every) > 1 and sum(candidate_.kl is None for candidate_ in every) <= 1:
        return "kl"
    return "perplexity"


def row(name: str, result: Mapping[str, Any], is_best: bool) -> list[str]:
    """A run's row of the summary table."""
    record = result["llmopt"]
    scored = record["quality"] or {}
    return [
        name,
        size(served_weight_bytes(result)),
        number(scored.get("perplexity"), 3),
        number(scored.get("kl_nats"), 4),
        percent(scored.get("top1_agreement")),
        number(result["output_throughput"], 0),
        f"{number(record['metrics']['ttft']['median'], 1)} ms",
        f"{number(record['metrics']['tpot']['median'], 2)} ms",
        "yes" if is_best else "no",
    ]


def joined_verdict(
    results: Mapping[str, Mapping[str, Any]], best: Sequence[str], quality_name: str | None
) -> Verdict:
    """The Pareto-optimal runs, as a sentence."""
    fastest = max(results, key=lambda name: results[name]["output_throughput"] or 0.0)
    held = {name: served_weight_bytes(result) for name, result in results.items()}
    known = {name: value for name, value in held.items() if value is not None}
    clauses = [f"Fastest: {fastest}"]
    if known:
        clauses.append(f"smallest: {min(known, key=lambda name: known[name])}")
    if quality_name is None:
        headline = "No quality was scored alike in all of them"
        return Verdict("unsure", headline + ".", "; ".join(clauses) + ".")
    behind = [name for name in results if name not in best]
    headline = f"Worth choosing among: {', '.join(best)}"
    if behind:
        clauses.append(
            f"{', '.join(behind)}: another is at least as small, as fast and as close to the original"
        )
    return Verdict("plain", headline + ".", "; ".join(clauses) + ".")


def differences(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Obstacles to comparing these runs, and notes on each."""
    names = list(results)
    obstacles = []
    for name in names[1:]:
        for reason in incomparable(results[names[0]], results[name]):
            obstacles.append(f"Not comparable in speed: {name} and {names[0]}: {reason}.")
    for name, result in results.items():
        if result["llmopt"]["interrupted"]:
            obstacles.append(f"{name} was interrupted.")
    notes = [warning for result in results.values() for warning in warnings(result)]
    return [*obstacles, *dict.fromkeys(notes), *widened_notes(results)]
