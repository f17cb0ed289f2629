"""Report of a comparison: verdict, changes with confidence intervals, quality and memory."""

from __future__ import annotations

from ..gate.compare import Comparison, RunData
from ..gate.limits import Outcome
from ..load.step_split import reason_in_words, split_table
from ..page.page import Card, Figure, Page, Section, Table, Verdict, number, percent, size
from ..quality.sections import layer_sections
from .comparison_plots import comparison_figures, label_of
from .comparison_tables import (
    TONES,
    deltas_table,
    memory_rows,
    operating_table,
    quality_rows,
    task_rows,
)
from .formula_table import formula_table
from .plots import CAPTIONS
from .result_tables import environment_table, identity_table, quality_and_memory, roofline_table
from .run_words import subtitle, warnings

HEADLINES = {
    Outcome.PASS: "Pass",
    Outcome.REGRESSION: "Regression",
    Outcome.NO_VERDICT: "No verdict",
}
RULES = {
    "pass": "non-inferiority: for every limit the 95 % bound of the worsening is within it, so that a metric "
    "that is worse by its limit passes in at most 5 % of comparisons",
    "regression": "for a limit the bound at 1 %, divided over the limits, is beyond it, so that a gate of "
    "which no limit is broken reports a regression in at most 1 % of comparisons",
    "no verdict": "everything else: too noisy, too few requests, different work, an interrupted run",
    "change": "paired starts: the Hodges-Lehmann estimate over the pairs; passes in turns: the mean of "
    "ln(new / base); two single runs: mean over the passes of ln(new) - mean of ln(base)",
    "test": "paired starts: the exact signed-rank test, after every second pair, with the errors spent over "
    "the looks (Lan and DeMets); otherwise Student's t over the passes",
    "two single runs": "how far two starts of one build differ cannot be seen: it is assumed to be the "
    "spread between passes, and 1.5 % at least; with fewer than three passes 12 %, or the spread "
    "between requests",
    "disturbed passes": "are left out by their own evidence (run queue, steal, involuntary switches); in "
    "runs without such evidence background load of a share L widens the error by 0.16 ln(1 / (1 - L))",
    "quality": "the whole 95 % interval keeps its limit, or is beyond it; block bootstrap over the "
    "documents or windows of the text; between two runs of the same tokens paired by position "
    "(quality.parquet), so that equal models differ by nothing",
    "task scores": "paired item by item (tasks.parquet): McNemar's exact test and Tango's score interval for "
    "scores of 0 and 1, a bootstrap over the items for others; runs that respond to every item alike differ "
    "by nothing",
    "counts": "failed requests by Fisher's exact test, preemptions as rates of rare events, output lengths "
    "request by request, memory by start; bytes that do not vary as they are",
}


def verdict_of(comparison: Comparison) -> Verdict:
    """The verdict as headline and sentence."""
    headline = f"{HEADLINES[comparison.outcome]}: {comparison.new} against {comparison.base}"
    return Verdict(TONES[comparison.outcome], headline, f"{comparison.sentence}.")


def comparison_page(
    base: RunData, new: RunData, comparison: Comparison, *, with_figures: bool = True
) -> Page:
    """The page comparing two runs; without figures for a standalone Markdown file."""
    captions = {
        "side-by-side": "Speed over all passes, quality on fixed tokens, and what the engine holds.",
        "changes": "Dots are estimates, bars 90 % intervals, dashes the limits. Throughput is shown "
        "as time per token, so that right is worse everywhere.",
        "operating-curve": "Chance of each verdict by the true change, at the noise of these pairs; dashes "
        "are the limit.",
        **CAPTIONS,
    }
    svgs = comparison_figures(base, new, comparison) if with_figures else {}
    figures = {name: Figure(name, svg, captions[name]) for name, svg in svgs.items()}
    rules = Table(["", ""], [[name, text] for name, text in RULES.items()], is_prose=True)
    gated = comparison.deltas or comparison.checks
    tables = [deltas_table(comparison.deltas, checks=comparison.checks)] if gated else []
    other = [*quality_rows(comparison), *task_rows(comparison), *memory_rows(comparison)]
    if other:
        tables.append(Table(["", "base", "new", "change"], other))
    results = {base.name: base.result, label_of(base, new): new.result}
    roofs = {name: r["llmopt"]["roofline"] for name, r in results.items()}
    return Page(
        title=f"{new.name} against {base.name}",
        subtitle=subtitle(new.result),
        verdict=verdict_of(comparison),
        cards=delta_cards(comparison),
        sections=[
            Section(
                "Changes",
                [note[0].upper() + note[1:] + "." for note in comparison.notes],
                [figures[n] for n in ("changes", "side-by-side") if n in figures],
                tables,
            ),
            *operating_sections(comparison, figures),
            Section("Latency", (), [figures[n] for n in ("distributions",) if n in figures]),
            Section(
                "Roofline",
                [reason] if (reason := reason_in_words(base.result, new.result)) else (),
                [figures[n] for n in ("roofline",) if n in figures],
                [roofline_table(roofs), *([split] if (split := split_table(results)) else ())],
            ),
            Section("Quality and memory", (), (), quality_and_memory(results)),
            *layer_sections(results),
            Section("How the verdict is made", (), (), (rules,)),
            Section("How each number is made", (), (), (formula_table(),)),
            Section("What was run: base", (), (), (identity_table(base.result),), folded=True),
            Section("What was run: new", (), (), (identity_table(new.result),), folded=True),
            Section(
                "Environment",
                (),
                (),
                (environment_table(new.result["llmopt"]["environment"]),),
                folded=True,
            ),
        ],
        warnings=[*dict.fromkeys([*warnings(base.result), *warnings(new.result)])],
    )


def operating_sections(comparison: Comparison, figures: dict[str, Figure]) -> list[Section]:
    """The operating curves of paired starts as table and figure; none for other comparisons."""
    if not comparison.curves:
        return []
    shown = [figures[name] for name in ("operating-curve",) if name in figures]
    table = operating_table(comparison.curves)
    return [Section("What this comparison could tell", (), shown, (table,), tables_first=True)]


def delta_cards(comparison: Comparison) -> list[Card]:
    """The changes as key figures."""
    cards = [
        Card(
            delta.label,
            percent(delta.change, signed=True),
            "",
            f"{number(delta.base)} → {number(delta.new)} {delta.unit}",
        )
        for delta in comparison.deltas
    ]
    scored = comparison.quality
    if scored and scored["perplexity_change"] is not None:
        base, new = scored["perplexity"]
        change = percent(scored["perplexity_change"], 2, signed=True)
        cards.append(Card("Perplexity", change, "", f"{base:.3f} → {new:.3f}"))
    base, new = comparison.memory.get("served_weight_bytes", (None, None))
    if base and new:
        cards.append(
            Card("Weights", percent(new / base - 1, signed=True), "", f"{size(base)} → {size(new)}")
        )
    return cards
