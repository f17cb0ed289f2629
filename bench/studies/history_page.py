"""The page of a history: every series with its change points and their commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..page.page import Figure, Page, ReportVerdict, percent
from ..page.plot_style import ABOVE, BAD, BASE, GOOD, MUTED, canvas, name_points, title, to_svg
from ..page.templates import page_of
from .history_series import MAX_PVALUE, MIN_SEGMENT, WINDOW, Series, SeriesChange

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_TICKS = 12


def history_page(series: Sequence[Series]) -> Page:
    """One section for each identity, with a figure for each of its metrics."""
    by_identity: dict[str, list[Series]] = {}
    for each in series:
        by_identity.setdefault(each.runs[-1].series_id, []).append(each)
    return page_of(
        "studies/history.jinja",
        identities=list(by_identity.values()),
        runs={run.run_id for each in series for run in each.runs},
        verdict=history_verdict(series),
        series_figure=lambda each: Figure(
            f"{each.runs[-1].series_id}-{each.metric.key}", series_svg(each)
        ),
        rules={"pvalue": MAX_PVALUE, "segment": MIN_SEGMENT, "window": WINDOW},
    )


def history_verdict(series: Sequence[Series]) -> ReportVerdict:
    """How many change points there are, and the worst of them."""
    changes = [(each, change) for each in series for change in each.changes]
    worse = [pair for pair in changes if pair[1].worse > 0]
    if not any(each.analysed for each in series):
        return ReportVerdict("unsure", "Nothing was analysed.", "Every run was set aside.")
    if not changes:
        return ReportVerdict("plain", "No change points.", "The series vary around one level each.")
    headline = f"{len(changes)} change points, {len(worse)} for the worse."
    if not worse:
        return ReportVerdict("good", headline, "Every change was an improvement.")
    where, worst = max(worse, key=lambda pair: pair[1].worse)
    said = f"The largest: {where.metric.label}, {percent(worst.worse)} worse since {worst.where}."
    return ReportVerdict("bad", headline, said)


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
    step = max(1, -(-len(series.runs) // MAX_TICKS))
    ticks = range(0, len(series.runs), step)
    axis.set_xticks(list(ticks), [series.runs[place].commit[:8] for place in ticks])
    title(axis, f"{series.metric.label} ({series.metric.unit})", pad=28 if series.changes else 8)
    axis.margins(y=0.2)
    _name_changes(axis, series.changes, position)
    return to_svg(figure, f"{series.metric.label} of {series.name}")


def _name_changes(axis: Axes, changes: Sequence[SeriesChange], position: Mapping[str, int]) -> None:
    """A line at each change point; above it the commit and the change, of the largest ones where not all
    have room."""
    ordered = sorted(changes, key=lambda one: -abs(one.worse))
    colours = [BAD if change.worse > 0 else GOOD for change in ordered]
    names = []
    for change, colour in zip(ordered, colours, strict=True):
        way = "worse" if change.worse > 0 else "better"
        place = position[change.after.run_id] - 0.5
        axis.axvline(place, color=colour, linewidth=1.2, linestyle="--")
        said = f"{change.after.commit[:12]}  {percent(abs(change.worse))} {way}"
        names.append((said, (place, 1.0)))
    at_top = {"xycoords": axis.get_xaxis_transform(), "fontsize": 8}
    for number, text in name_points(axis, names, places=ABOVE, **at_top).items():
        text.set_color(colours[number])


def _dots(
    axis: Axes, position: Mapping[str, int], values: Mapping[str, float], colour: str
) -> None:
    places = [position[run_id] for run_id in values]
    axis.plot(places, list(values.values()), "o", color=colour, markersize=4, alpha=0.75)
