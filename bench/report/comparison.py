"""Comparison tables: gated metrics, checks, quality and memory of base and new."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..gate.compare import Comparison, RunData
from ..gate.limits import SCORED, GateOutcome, depth_scored
from ..gate.verdict import (
    FALSE_PASS,
    FALSE_REGRESSION,
    LimitVerdict,
    MeasuredVerdict,
    OperatingCurve,
    between,
)
from ..page.page import (
    Card,
    Page,
    ReportTable,
    ReportVerdict,
    Tone,
    markdown_table,
    number,
    percent,
    sentence,
    signed_percent,
    sizes,
    span,
)
from .figures import changes_svg, figures_of, operating_curve_svg, slowdown_bounds
from .parts import named_caveats, report_page

# By the outcome of a limit, or the verdict on an aspect without one.
TONES: dict[str, Tone] = {
    **dict.fromkeys((GateOutcome.PASS, "better"), "good"),
    **dict.fromkeys((GateOutcome.REGRESSION, "worse"), "bad"),
    **dict.fromkeys((GateOutcome.NO_VERDICT, "undecided"), "unsure"),
}


def deltas_table(
    deltas: Sequence[MeasuredVerdict], caption: str = "", checks: Sequence[LimitVerdict] = ()
) -> ReportTable:
    """The gated metrics with change, interval, limit and verdict."""
    rows = [*delta_rows(deltas, interval_words), *check_rows(checks)]
    tones: dict[int, Tone] = {number: TONES[row[-1]] for number, row in enumerate(rows)}
    header = ["metric", "base", "new", "change", "90 % interval", "limit", "verdict"]
    return ReportTable(header, rows, caption=caption, tones=tones)


def delta_rows(
    deltas: Sequence[MeasuredVerdict], uncertainty: Callable[[MeasuredVerdict], str]
) -> list[list[str]]:
    """Rows of measured metrics, with the words for the uncertainty of a change."""
    rows = []
    for delta in deltas:
        change = percent(delta.change, signed=True), uncertainty(delta)
        ends = number(delta.base), number(delta.new)
        name = f"{delta.label} ({delta.unit})"
        rows.append([name, *ends, *change, delta.limit, delta.outcome.value])
    return rows


def interval_words(delta: MeasuredVerdict) -> str:
    """The 90 % interval of a change; `unbounded` with too few pairs."""
    if not math.isfinite(delta.high):
        return "unbounded"
    return f"{percent(delta.low, signed=True)} to {percent(delta.high, signed=True)}"


def operating_table(curves: Sequence[OperatingCurve]) -> ReportTable:
    """The chance of each verdict by the true change of each limited metric."""
    rows = [
        [
            f"{curve.label} {curve.limit}",
            percent(point.worse, signed=True),
            percent(point.passes),
            percent(point.regressions),
            percent(point.undecided),
            number(point.mean_pairs, 1),
        ]
        for curve in curves
        for point in curve.points
    ]
    pairs = max(curve.max_pairs for curve in curves)
    caption = f"Simulated from the residuals of the pairs, for at most {pairs} pairs of starts."
    header = ["limit", "truly worse by", "pass", "regression", "no verdict", "pairs"]
    return ReportTable(header, rows, caption=caption)


def check_rows(checks: Sequence[LimitVerdict]) -> list[list[str]]:
    """Rows of deterministic checks, in the columns of `deltas_table`."""
    rows = []
    for check in checks:
        base, new = check.base, check.new
        moved = "" if check.change is None else signed_percent(check.change, 2)
        ends = sizes(base, new) if check.unit == "bytes" else (number(base, 4), number(new, 4))
        label = check.label if check.unit in ("", "bytes") else f"{check.label} ({check.unit})"
        is_change, sides = check.limit.endswith("%"), check.interval
        shown = partial(percent, digits=2, signed=True) if is_change else partial(number, digits=4)
        interval = ""  # of the score, or of its change; an exact value has none
        if sides is not None and sides[0] != sides[1]:
            interval = f"{span(sides, shown)} (95 %)"
        rows.append([label, *ends, moved, interval, check.limit, check.outcome.value])
    return rows


def unlimited_table(comparison: Comparison) -> ReportTable:
    """Quality, task scores and memory of both sides, whether a limit is on them or not."""
    rows = [*quality_rows(comparison), *task_rows(comparison), *memory_rows(comparison)]
    return ReportTable(["", "base", "new", "change"], rows)


def memory_rows(comparison: Comparison) -> list[list[str]]:
    names = {
        "served_weight_bytes": "Weights as served",
        "weight_bytes": "Weights held",
        "checkpoint_bytes": "Checkpoint on disk",
        "kv_cache_bytes": "KV cache",
        "peak_resident_bytes": "Peak resident",
    }
    return [
        [names[key], *sizes(base, new), signed_percent(new / base - 1)]
        for key, (base, new) in comparison.memory.items()
        if base and new
    ]


def quality_rows(comparison: Comparison) -> list[list[str]]:
    """Perplexity of base and new, and KL divergence and top-1 agreement with the reference."""
    scored = comparison.quality
    if not scored:
        return []

    def felt(unit: str, value: float | None) -> str:
        if value is None:
            return ""
        return percent(value, 2) if unit == "share" else f"{number(value, 5)} {unit}"

    change = percent(scored["perplexity_change"], 2, signed=True)
    if bounds := scored.get("perplexity_change_interval"):  # positions were paired
        change += f" ({span(bounds, partial(percent, digits=2, signed=True))})"
    kl = (number(scored.get(key), 5) for key in ("base_kl_nats", "kl_nats"))
    top1 = (percent(scored.get(key), 2) for key in ("base_top1_agreement", "top1_agreement"))
    rows = [
        ["Perplexity", *(number(value, 4) for value in scored["perplexity"]), change],
        ["KL from the reference (nats)", *kl, ""],
        ["Top-1 agreement with the reference", *top1, ""],
    ]
    for key, sides in scored.get("felt", {}).items():
        what = SCORED.get(key) or depth_scored(key)
        assert what is not None, key
        rows.append([what.label, *(felt(what.unit, side) for side in sides), ""])
    return rows


def task_rows(comparison: Comparison) -> list[list[str]]:
    shown, rows = partial(percent, digits=2, signed=True), []
    for change in comparison.tasks:
        name = f"{change.key.removeprefix('task.').removesuffix('.none')} ({change.words})"
        ends = number(change.base, 4), number(change.new, 4)
        moved = shown(change.change) if math.isfinite(change.change) else "unbounded"
        rows.append([name, *ends, moved + between(change.interval, shown)])
    return rows


def aspect_rows(comparison: Comparison) -> list[list[str]]:
    rows = [[aspect.aspect, aspect.verdict, aspect.words] for aspect in comparison.aspects]
    decided = ", ".join(comparison.decided_by) or "; ".join(comparison.reasons)
    return [*rows, ["overall", comparison.outcome.value, decided]]


def aspects_table(comparison: Comparison) -> ReportTable:
    rows = aspect_rows(comparison)
    tones: dict[int, Tone] = {
        row: TONES.get(verdict, "plain") for row, (_, verdict, _) in enumerate(rows)
    }
    caption = "A verdict is by the limits; without one, by the interval of the change."
    return ReportTable(["", "verdict", "by"], rows, caption, tones, is_prose=True)


def verdict_of(comparison: Comparison) -> ReportVerdict:
    headline = f"{comparison.outcome.capitalize()}: {comparison.title}"
    return ReportVerdict(TONES[comparison.outcome], headline, f"{comparison.sentence}.")


CAPTIONS = {
    "side-by-side": "Speed over all passes, quality on fixed tokens, and what the engine holds.",
    "changes": "Dots are estimates, bars 90 % intervals, dashes the limits. Throughput is shown "
    "as time per token, so that right is worse everywhere.",
    "operating-curve": "Chance of each verdict by the true change, at the noise of these pairs; "
    "dashes are the limit.",
}


def comparison_page(
    base: RunData,
    new: RunData,
    comparison: Comparison,
    starts: Mapping[str, Any] | None = None,
) -> Page:
    """The page of two runs; of paired `starts` with a table of them."""
    runs = {new.name: new}
    if not comparison.is_alone:
        runs = {base.name: base, new.name if new.name != base.name else f"{new.name} (new)": new}
    results = {name: run.result for name, run in runs.items()}
    caveats, svgs = named_caveats(results), {}
    if comparison.deltas:
        svgs["changes"] = changes_svg(comparison.deltas)
    if comparison.curves:
        svgs["operating-curve"] = operating_curve_svg(comparison.curves)
    return report_page(
        "report/comparison.jinja",
        base=base,
        new=new,
        results=results,
        comparison=comparison,
        verdict=verdict_of(comparison),
        warnings=caveats["warnings"],
        notes=[*caveats["notes"], *map(sentence, comparison.notes)],
        cards=delta_cards(comparison),
        figures=figures_of(runs, len(runs), svgs, CAPTIONS),
        aspects=aspects_table(comparison),
        limits=deltas_table(comparison.deltas, checks=comparison.checks),
        others=unlimited_table(comparison),
        operating_table=operating_table,
        starts=starts,
    )


PLOT_WIDTH = 41


def summary(comparison: Comparison) -> str:
    """The verdict in Markdown for the page of a job: sentence, table, plot, and error rates."""
    table = deltas_table(comparison.deltas, checks=comparison.checks)
    verdict = verdict_of(comparison)
    lines = [f"### {verdict.headline}", "", verdict.sentence, ""]
    if table.rows:
        lines += [*markdown_table(table.header, table.rows), ""]
    if drawn := plot_lines(comparison.deltas):
        legend = "worse is right; ● change, ─ 90 % interval, ┊ no change, ┃ limit"
        lines += ["```text", *drawn, legend, "```", ""]
    pairs = comparison.num_pairs
    by = f"{pairs} pairs of runs" if pairs else "one run of each side"
    lines += [
        f"How sure: judged by {by}. A build that is worse by its limit passes in at most {FALSE_PASS:.0%} of "
        f"comparisons; one that keeps every limit is called a regression in at most {FALSE_REGRESSION:.0%}, "
        "over all looks.",
        *(f"- {note}" for note in (*comparison.notes, *comparison.differs_by)),
    ]
    return "\n".join(lines) + "\n"


def plot_lines(deltas: Sequence[MeasuredVerdict]) -> list[str]:
    """A line of text for each change with its interval and limit, on one scale."""
    shown = [delta for delta in deltas if delta.allowed is not None]
    slowdowns = [slowdown_bounds(delta) for delta in shown]
    ends = [abs(end) for sides in slowdowns for end in sides]
    ends += [abs(delta.allowed or 0.0) for delta in shown]
    reach = min(max((end for end in ends if math.isfinite(end)), default=1.0) * 1.1 or 1.0, 1.0)

    def column(value: float) -> int:
        inside = max(-reach, min(reach, value))
        return round((inside / reach + 1) / 2 * (PLOT_WIDTH - 1))

    lines = []
    for delta, sides in zip(shown, slowdowns, strict=True):
        low, high = map(column, sides)
        row = ["─" if low <= dot <= high else " " for dot in range(PLOT_WIDTH)]
        marks = {column(0.0): "┊", column(delta.allowed or 0.0): "┃", column(delta.worse): "●"}
        for dot, mark in marks.items():
            row[dot] = mark
        lines.append(f"{delta.label[:26]:<26} {''.join(row)}".rstrip())
    scale = f"{-reach:.0%}"
    return [*lines, f"{'':<26} {scale:<{PLOT_WIDTH - 4}}{reach:>+4.0%}"] if lines else []


def delta_cards(comparison: Comparison) -> list[Card]:
    cards = []
    for delta in comparison.deltas:
        ends = f"{number(delta.base)} → {number(delta.new)} {delta.unit}"
        cards.append(Card(delta.label, percent(delta.change, signed=True), "", ends))
    scored = comparison.quality
    if scored and scored["perplexity_change"] is not None:
        base, new = scored["perplexity"]
        change = percent(scored["perplexity_change"], 2, signed=True)
        cards.append(Card("Perplexity", change, "", f"{number(base, 4)} → {number(new, 4)}"))
    base, new = comparison.memory.get("served_weight_bytes", (None, None))
    if base and new:
        ends = " → ".join(sizes(base, new))
        cards.append(Card("Weights", signed_percent(new / base - 1), "", ends))
    return cards
