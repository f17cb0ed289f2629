"""The page of a history: every series with its change points and their commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quant.base.atomic_io import write_atomically
from ..page.page import (
    Figure,
    Page,
    Section,
    Table,
    Tone,
    Verdict,
    number,
    percent,
    to_html,
    to_markdown,
)
from ..page.plot_style import BAD, BASE, GOOD, MUTED, canvas, title, to_svg
from .series import MAX_PVALUE, MIN_SEGMENT, WINDOW, Series, SeriesChange

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = ("metric", "since commit", "date", "before", "from", "to", "change", "since best", "p")
RULES = {
    "change point": "E-divisive means (Matteson and James, 2014): the runs are bisected where the energy "
    f"distance between both sides is largest, in windows of {WINDOW} runs that overlap by half",
    "significance": "Student's t-test between the logarithms of both segments, its p-value times the number "
    f"of splits that were compared: {MAX_PVALUE} at most; {MIN_SEGMENT} runs on each side at least",
    "change": "ratio of the geometric means of both segments, positive where the metric got worse",
    "since best": "the same against the best segment before: small losses add up",
    "set aside": "runs that were interrupted, had failed requests, an uncertified client, or a busy machine "
    "in every pass: shown grey, not analysed",
}
MAX_TICKS = 12


def write_history(series: Sequence[Series], output: Path | None, markdown: Path | None) -> None:
    """Write the page as HTML and the tables as Markdown, where asked for."""
    page = history_page(series)
    if output is not None:
        write_atomically(output, to_html(page))
    if markdown is not None:
        write_atomically(markdown, to_markdown(page.without_figures()))


def history_page(series: Sequence[Series]) -> Page:
    """One section for each identity, with a figure for each of its metrics."""
    by_identity: dict[str, list[Series]] = {}
    for each in series:
        by_identity.setdefault(each.runs[-1].series_id, []).append(each)
    runs = {run.run_id for each in series for run in each.runs}
    rules = Table(("", ""), [list(rule) for rule in RULES.items()], is_prose=True)
    return Page(
        title="History of runs",
        subtitle=f"{len(runs)} run{'' if len(runs) == 1 else 's'} in {len(by_identity)} series",
        verdict=history_verdict(series),
        cards=(),
        sections=[
            *(_section(of_identity) for of_identity in by_identity.values()),
            Section("How change points are made", (), (), (rules,)),
        ],
    )


def history_verdict(series: Sequence[Series]) -> Verdict:
    """How many change points there are, and the worst of them."""
    changes = [(each, change) for each in series for change in each.changes]
    worse = [pair for pair in changes if pair[1].worse > 0]
    if not any(each.analysed for each in series):
        return Verdict("unsure", "Nothing was analysed.", "Every run was set aside.")
    if not changes:
        return Verdict("plain", "No change points.", "The series vary around one level each.")
    headline = f"{len(changes)} change points, {len(worse)} for the worse."
    if not worse:
        return Verdict("good", headline, "Every change was an improvement.")
    where, worst = max(worse, key=lambda pair: pair[1].worse)
    said = f"The largest: {where.metric.label}, {percent(worst.worse)} worse since {worst.where}."
    return Verdict("bad", headline, said)


def _section(of_identity: Sequence[Series]) -> Section:
    newest = of_identity[0].runs[-1]
    what = (
        f"{newest.series['machine']}, device {newest.series['device']}, target {newest.series['target']}, "
        f"workload {str(newest.series['workload_sha256'])[:12]}."
    )
    hardware = ", ".join(f"{name} {value}" for name, value in newest.series["hardware"].items())
    figures = [
        Figure(f"{newest.series_id}-{each.metric.key}", series_svg(each)) for each in of_identity
    ]
    tables = [changes_table(of_identity)] if any(each.points for each in of_identity) else []
    aside = {run.run_id: run for each in of_identity for run in each.runs if run.set_aside}
    if aside:
        rows = [[run.name, run.commit, run.date, str(run.set_aside)] for run in aside.values()]
        tables.append(Table(("set aside", "commit", "date", "because"), rows, is_prose=True))
    name = of_identity[0].name
    paragraphs = (what, f"Hardware: {hardware or 'not recorded'}.")
    return Section(name, paragraphs, figures, tables)


def changes_table(series: Sequence[Series]) -> Table:
    """The change points of several metrics, oldest first."""
    pairs = [(each, change) for each in series for change in each.changes]
    pairs.sort(key=lambda pair: pair[1].after.date)
    tones: dict[int, Tone] = {
        row: "bad" if change.worse > 0 else "good" for row, (_, change) in enumerate(pairs)
    }
    return Table(HEADER, [change_row(each, change) for each, change in pairs], tones=tones)


def change_row(series: Series, change: SeriesChange) -> list[str]:
    return [
        f"{series.metric.label} ({series.metric.unit})",
        change.after.commit,
        change.after.day,
        change.before.commit,
        number(change.level_before),
        number(change.level_after),
        f"{percent(abs(change.worse))} {'worse' if change.worse > 0 else 'better'}",
        percent(change.since_best, signed=True),
        f"{change.pvalue:.1g}",
    ]


def series_svg(series: Series) -> str:
    """The runs, the level of each segment, and the change points with their commits."""
    figure, (axis,) = canvas(width=11, height=2.9)
    position = {run.run_id: place for place, run in enumerate(series.runs)}
    aside = [run for run in series.runs if run.set_aside]
    _dots(axis, position, {run.run_id: run.values[series.metric.key] for run in aside}, MUTED)
    analysed = {run.run_id: run.values[series.metric.key] for run in series.analysed}
    _dots(axis, position, analysed, BASE)
    for start, end, level in series.levels:
        places = [
            position[run.run_id] for run in (series.analysed[start], series.analysed[end - 1])
        ]
        axis.plot([places[0] - 0.4, places[1] + 0.4], [level, level], color=BASE, linewidth=2)
    for change in series.changes:
        colour = BAD if change.worse > 0 else GOOD
        place = position[change.after.run_id] - 0.5
        axis.axvline(place, color=colour, linewidth=1.2, linestyle="--")
        way = "worse" if change.worse > 0 else "better"
        axis.annotate(
            f"{change.after.commit[:12]}  {percent(abs(change.worse))} {way}",
            (place, 0.98),
            xytext=(3, 0),
            textcoords="offset points",
            xycoords=axis.get_xaxis_transform(),
            color=colour,
            fontsize=8,
            rotation=90,
            va="top",
        )
    step = max(1, -(-len(series.runs) // MAX_TICKS))
    ticks = range(0, len(series.runs), step)
    axis.set_xticks(list(ticks), [series.runs[place].commit[:8] for place in ticks])
    title(axis, f"{series.metric.label} ({series.metric.unit})")
    axis.margins(y=0.2)
    return to_svg(figure, f"{series.metric.label} of {series.name}")


def _dots(
    axis: Axes, position: Mapping[str, int], values: Mapping[str, float], colour: str
) -> None:
    places = [position[run_id] for run_id in values]
    axis.plot(places, list(values.values()), "o", color=colour, markersize=4, alpha=0.75)
