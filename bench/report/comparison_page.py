"""A comparison as a page: the verdict, the changes with their intervals, quality and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..gate.compare import Comparison, RunData
from ..gate.gate import Outcome
from ..gate.judge import Check, Delta
from ..load.step_split import reason_in_words, split_table
from ..page.page import Card, Figure, Page, Section, Table, Tone, Verdict
from ..page.plot_style import BAD, GOOD, GRID, INK, MUTED, SERIES, UNSURE, canvas, title, to_svg
from ..page.text import number, percent, size
from ..quality.layer_errors import layer_sections
from .plots import distributions_svg, roofline_svg
from .report import (
    CAPTIONS,
    environment_table,
    formula_table,
    identity_table,
    quality_and_memory,
    roofline_table,
    subtitle,
    warnings,
)

TONES: dict[Outcome, Tone] = {
    Outcome.PASS: "good",
    Outcome.REGRESSION: "bad",
    Outcome.NO_VERDICT: "unsure",
}
HEADLINES = {
    Outcome.PASS: "Pass",
    Outcome.REGRESSION: "Regression",
    Outcome.NO_VERDICT: "No verdict",
}
RULES = {
    "regression": "a metric is beyond its limit, and no change at all is excluded at the level at which "
    "all limits together raise a false alarm in 2 % of equal runs, after taking off what others on the "
    "machine may have caused; bytes, counts and quality need no statistics",
    "pass": "no limit is broken, and the 95 % bound of each metric keeps its limit, or is no wider",
    "no verdict": "everything else: too noisy, a busy machine, different work, failed requests on both "
    "sides",
    "change": "mean over the passes of ln(new) − mean of ln(base), as a share",
    "uncertainty": "the spread between passes, pooled over both runs, with Student's t; for runs that "
    "took turns the spread of their differences, pass by pass; with fewer than three passes an assumed "
    "spread of 5 %, or the spread between requests (bootstrap over pairs of the same request) where "
    "that is larger; for runs that took no turns 1.5 % between two starts of the same model besides",
    "busy machine": "if others kept a share L of the processors busy, a slowdown of up to 1 / (1 − L) may "
    "be theirs; runs that took turns met the same neighbours",
}


def changes_svg(deltas: Sequence[Delta]) -> str:
    """Slowdown of every gated metric with its 90 % interval and its limit; right is worse."""
    figure, (axis,) = canvas(width=11, height=0.9 + 0.5 * len(deltas))
    colours = {Outcome.PASS: GOOD, Outcome.REGRESSION: BAD, Outcome.NO_VERDICT: UNSURE}
    for row, delta in enumerate(deltas):
        low, high = slowdown_bounds(delta)
        colour = colours[delta.outcome]
        axis.plot([low * 100, high * 100], [row, row], color=colour, linewidth=3, alpha=0.45)
        axis.plot(delta.worse * 100, row, "o", color=colour, markersize=8)
        if delta.allowed is not None:
            at = delta.allowed * 100
            axis.plot([at, at], [row - 0.3, row + 0.3], color=BAD, linewidth=1.5, linestyle="--")
    axis.axvline(0, color=INK, linewidth=1)
    axis.set_yticks(range(len(deltas)), [delta.label for delta in deltas])
    axis.set_ylim(len(deltas) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("% slower than the base (left of 0: faster)")
    return to_svg(figure, "Change of every gated metric with its interval")


def slowdown_bounds(delta: Delta) -> tuple[float, float]:
    """The interval of `change`, turned so that positive is worse."""
    if (delta.change > 0) == (delta.worse > 0):
        return delta.low, delta.high
    return 1 / (1 + delta.high) - 1, 1 / (1 + delta.low) - 1


def bars_svg(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Speed, quality and memory of several runs, side by side."""
    panels: list[tuple[str, str, list[float | None]]] = [
        ("Output throughput", "tokens/s", [r["output_throughput"] for r in results.values()]),
        (
            "Median TPOT",
            "ms",
            [r["llmopt"]["metrics"]["tpot"]["median"] for r in results.values()],
        ),
        (
            "Perplexity",
            "lower is better",
            [(r["llmopt"]["quality"] or {}).get("perplexity") for r in results.values()],
        ),
        (
            "Weights held",
            "MiB",
            [
                held / 2**20 if (held := r["llmopt"]["memory"]["weight_bytes"]) else None
                for r in results.values()
            ],
        ),
    ]
    figure, axes = canvas(len(panels), width=11, height=2.9)
    for axis, (heading, unit, values) in zip(axes, panels, strict=True):
        heights = [value or 0.0 for value in values]
        bars = axis.bar(range(len(values)), heights, color=SERIES[: len(values)], width=0.62)
        labels = ["n/a" if value is None else f"{value:,.4g}" for value in values]
        axis.bar_label(bars, labels=labels, padding=2, fontsize=9, color=INK)
        axis.set_xticks(range(len(values)), list(results))
        title(axis, f"{heading} ({unit})")
        axis.grid(visible=False, axis="x")
        axis.margins(y=0.16)
        axis.spines["left"].set_visible(False)
        axis.set_yticks([])
        axis.spines["bottom"].set_color(GRID)
        axis.tick_params(axis="x", colors=MUTED)
    return to_svg(figure, "Speed, quality and memory side by side")


def check_rows(checks: Sequence[Check]) -> list[list[str]]:
    """Rows of what needs no statistics, in the columns of `deltas_table`."""
    found = []
    for one in checks:
        base, new = one.base, one.new
        change = percent(new / base - 1, 2, signed=True) if base and new is not None else ""
        shown = size if one.unit == "bytes" else partial(number, digits=4)
        label = one.label if one.unit in ("", "bytes") else f"{one.label} ({one.unit})"
        found.append([label, shown(base), shown(new), change, "", one.limit, one.outcome.value])
    return found


def deltas_table(deltas: Sequence[Delta], caption: str = "", checks: Sequence[Check] = ()) -> Table:
    """The gated metrics with change, interval, limit and answer."""
    rows, tones = [], {}
    for row, delta in enumerate(deltas):
        rows.append(
            [
                f"{delta.label} ({delta.unit})",
                number(delta.base),
                number(delta.new),
                percent(delta.change, signed=True),
                f"{percent(delta.low, signed=True)} to {percent(delta.high, signed=True)}",
                delta.limit,
                delta.outcome.value,
            ]
        )
        tones[row] = TONES[delta.outcome]
    for row in check_rows(checks):
        tones[len(rows)] = TONES[Outcome(row[-1])]
        rows.append(row)
    header = ["metric", "base", "new", "change", "90 % interval", "limit", "verdict"]
    return Table(header, rows, caption=caption, tones=tones)


def memory_rows(comparison: Comparison) -> list[list[str]]:
    """What is held in memory, before and after."""
    names = {
        "weight_bytes": "Weights held",
        "checkpoint_bytes": "Checkpoint on disk",
        "kv_cache_bytes": "KV cache",
        "peak_resident_bytes": "Peak resident",
    }
    return [
        [names[key], size(base), size(new), percent(new / base - 1, signed=True)]
        for key, (base, new) in comparison.memory.items()
        if base and new
    ]


def quality_rows(comparison: Comparison) -> list[list[str]]:
    """Perplexity before and after, and the distance from the reference."""
    scored = comparison.quality
    if not scored:
        return []
    base, new = scored["perplexity"]
    return [
        [
            "Perplexity",
            number(base, 4),
            number(new, 4),
            percent(scored["perplexity_change"], 2, signed=True),
        ],
        ["KL from the reference (nats)", "", number(scored["kl_nats"], 5), ""],
        ["Top-1 agreement with the reference", "", percent(scored["top1_agreement"], 2), ""],
    ]


def verdict_of(comparison: Comparison) -> Verdict:
    """The answer in words."""
    headline = f"{HEADLINES[comparison.outcome]}: {comparison.new} against {comparison.base}"
    return Verdict(TONES[comparison.outcome], headline, "; ".join(comparison.reasons) + ".")


def latency_samples(data: RunData) -> dict[str, np.ndarray]:
    """The columns of a run's requests as samples for the distribution figure."""
    table = data.requests or {}
    found = {
        metric: np.array([v for v in table.get(f"{metric}_ms", []) if v is not None])
        for metric in ("ttft", "tpot", "e2el")
    }
    gaps = [np.diff(times) * 1000 for times in table.get("chunk_times_s", [])]
    found["itl"] = np.concatenate(gaps) if gaps else np.array([])
    return found


def comparison_figures(base: RunData, new: RunData, comparison: Comparison) -> dict[str, str]:
    """{file stem: svg} of a comparison."""
    results = {base.name: base.result, label_of(base, new): new.result}
    figures = {"side-by-side": bars_svg(results)}
    if comparison.deltas:
        figures["changes"] = changes_svg(comparison.deltas)
    if base.requests and new.requests:
        figures["distributions"] = distributions_svg(
            {base.name: latency_samples(base), label_of(base, new): latency_samples(new)}
        )
    roofs = {name: r["llmopt"]["roofline"] for name, r in results.items()}
    if all(roof and roof["points"] for roof in roofs.values()):
        figures["roofline"] = roofline_svg(roofs)
    return figures


def label_of(base: RunData, new: RunData) -> str:
    """The new run's name, told apart from the base's when they are the same."""
    return new.name if new.name != base.name else f"{new.name} (new)"


def comparison_page(
    base: RunData, new: RunData, comparison: Comparison, *, with_figures: bool = True
) -> Page:
    """The page of two runs; without figures for a Markdown file that stands alone."""
    captions = {
        "side-by-side": "Speed over all passes, quality on fixed tokens, and what the engine holds.",
        "changes": "Dots are estimates, bars 90 % intervals, dashes the limits. Throughput is turned "
        "into time per token, so that right is worse everywhere.",
        **CAPTIONS,
    }
    svgs = comparison_figures(base, new, comparison) if with_figures else {}
    figures = {name: Figure(name, svg, captions[name]) for name, svg in svgs.items()}
    rules = Table(["", ""], [[name, text] for name, text in RULES.items()], is_prose=True)
    gated = comparison.deltas or comparison.checks
    tables = [deltas_table(comparison.deltas, checks=comparison.checks)] if gated else []
    other = [*quality_rows(comparison), *memory_rows(comparison)]
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


def delta_cards(comparison: Comparison) -> list[Card]:
    """The changes as key numbers."""
    found = [
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
        found.append(Card("Perplexity", change, "", f"{base:.3f} → {new:.3f}"))
    base, new = comparison.memory.get("weight_bytes", (None, None))
    if base and new:
        found.append(
            Card("Weights", percent(new / base - 1, signed=True), "", f"{size(base)} → {size(new)}")
        )
    return found
