"""Series of a history with their page, and their change points by E-divisive means with Student's t-test.

Matteson and James (2014), A nonparametric approach for multiple change point analysis of multivariate data:
the series is bisected where the energy distance between both sides is largest, while splits are significant.
Fleming et al. (2023), Hunter: a t-test in place of the permutation test; windows, so that a long series does
not hide a short one; weak change points, merged away again.

Other than in Hunter a split is tested against the segment that is most distant from what is before it, as
E-divisive does, so that a loss that is recovered is seen; its p-value is multiplied by the number of splits
that it was chosen among (Bonferroni); and a segment has three values or more, so that one outlier is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...quant.base.errors import BadInput
from ..gate.limits import Quantity
from ..metrics.metrics import higher_is_better
from ..metrics.statistics import student_cdf, student_quantile
from ..page.page import Figure, Page, ReportVerdict, drawn, percent
from ..page.plot_style import ABOVE, BAD, BASE, GOOD, MUTED, canvas, name_points, title, to_svg
from ..page.templates import page_of
from .history_runs import HistoryRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_PVALUE = 0.0002
WEAK_FACTOR = 10
WINDOW = 50
MIN_SEGMENT = 3


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A change of the mean between two segments of a series of logarithms.

    Attributes:
        index: of the first value behind the change.
        log_ratio: mean behind the change − mean before it.
        pvalue: of the t-test between both segments, times the number of splits that were compared.
    """

    index: int
    log_ratio: float
    pvalue: float

    @property
    def change(self) -> float:
        """The change as a share of the level before it."""
        return math.expm1(self.log_ratio)


def change_points(
    values: Sequence[float] | np.ndarray,
    *,
    max_pvalue: float = MAX_PVALUE,
    window: int = WINDOW,
    min_segment: int = MIN_SEGMENT,
) -> list[ChangePoint]:
    """The significant changes of the mean of `values` (positive, in the order of measurement).

    Changes are relative: the logarithms are compared. Segments hold at least `min_segment` values.
    """
    logs = np.log(np.asarray(values, dtype=float))
    weak = _split(logs, max_pvalue * WEAK_FACTOR, window, min_segment)
    return _merge(logs, weak, max_pvalue, min_segment)


def _split(logs: np.ndarray, max_pvalue: float, window: int, min_segment: int) -> list[int]:
    """Weak change points: of windows that overlap by half, or that begin at the last change point."""
    splits: list[int] = []
    start = 0
    while start < len(logs):
        part = logs[start : start + window]
        of_window = [start + split for split in _bisect(part, max_pvalue, min_segment)]
        splits += [split for split in of_window if split not in splits]
        if start + window >= len(logs):
            break
        start = max([start + window // 2, *of_window[-1:]])
    return sorted(splits)


def _bisect(logs: np.ndarray, max_pvalue: float, min_segment: int) -> list[int]:
    """Hierarchical bisection at the most distant of the significant splits, one in each segment."""
    edges = [0, len(logs)]
    while True:
        candidates = [
            (best.distance, left + best.tau)
            for left, right in pairwise(edges)
            if (best := most_distant_split(logs[left:right], min_segment)) is not None
            and _compare(logs, left, left + best.tau, left + best.kappa, min_segment).pvalue
            <= max_pvalue
        ]
        if not candidates:
            return edges[1:-1]
        edges = sorted([*edges, max(candidates)[1]])


class Split(NamedTuple):
    """The split of values[:kappa] at `tau`, and the scaled energy distance between both sides."""

    tau: int
    kappa: int
    distance: float


def most_distant_split(values: np.ndarray, min_segment: int) -> Split | None:
    """The split with the largest scaled energy distance Q̂ between values[:τ] and values[τ:κ].

    κ before the end lets it see a change that is undone later. Equations 5 to 7 of Matteson and James with
    α = 1; None where two segments do not fit in.
    """
    count = len(values)
    if count < 2 * min_segment:
        return None
    distances = np.zeros((count + 1, count + 1))
    distances[1:, 1:] = np.abs(values[:, None] - values[None, :]).cumsum(axis=0).cumsum(axis=1)
    tau = np.arange(min_segment, count - min_segment + 1)[:, None]
    kappa = np.arange(2 * min_segment, count + 1)[None, :]
    left, right = tau, np.maximum(kappa - tau, 1)
    corner = distances[tau, tau]
    between = distances[tau, kappa] - corner
    within_left = corner / 2
    within_right = (distances[kappa, kappa] - 2 * distances[tau, kappa] + corner) / 2
    energy = (
        2 * between / (left * right)
        - within_left / np.maximum(left * (left - 1) / 2, 1)
        - within_right / np.maximum(right * (right - 1) / 2, 1)
    )
    scaled = np.where(kappa - tau >= min_segment, left * right / (left + right) * energy, -np.inf)
    row, column = np.unravel_index(int(np.argmax(scaled)), scaled.shape)
    return Split(int(tau[row, 0]), int(kappa[0, column]), float(scaled[row, column]))


def _merge(
    logs: np.ndarray, splits: Sequence[int], max_pvalue: float, min_segment: int
) -> list[ChangePoint]:
    """Remove the least significant change point until all are significant between their neighbours."""
    edges = [0, *splits, len(logs)]
    while True:
        points = [
            _compare(logs, start, split, end, min_segment)
            for start, split, end in zip(edges, edges[1:], edges[2:], strict=False)
        ]
        weakest = max(points, key=lambda point: point.pvalue, default=None)
        if weakest is None or weakest.pvalue <= max_pvalue:
            return points
        edges.remove(weakest.index)


def _compare(logs: np.ndarray, start: int, split: int, end: int, min_segment: int) -> ChangePoint:
    """Student's t-test of equal means between logs[start:split] and logs[split:end]."""
    left, right = logs[start:split], logs[split:end]
    difference = float(right.mean() - left.mean())
    degrees = end - start - 2
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in (left, right))
    error = math.sqrt(squares / degrees * (1 / len(left) + 1 / len(right)))
    compared = max(end - start - 2 * min_segment + 1, 1)
    if error == 0:
        return ChangePoint(split, difference, 0.0 if difference else 1.0)
    tail = 1 - student_cdf(abs(difference) / error, degrees)
    return ChangePoint(split, difference, min(1.0, 2 * tail * compared))


POWER = 0.8


@dataclass(frozen=True, slots=True)
class SeriesChange:
    """A change point of a series, with the runs on both of its sides.

    Attributes:
        before: the last run before the change; `after` is the first one behind it.
        num_newer: runs from `after` to the newest one.
        worse: the change as a share, positive where the metric got worse.
        since_best: the same against the best level of the series up to the change.
    """

    before: HistoryRun
    after: HistoryRun
    num_newer: int
    level_before: float
    level_after: float
    worse: float
    since_best: float
    pvalue: float

    @property
    def where(self) -> str:
        """The commits between which the change lies, and the day of the first run behind it."""
        commit, day = self.after.commit, self.after.day
        return f"commit {commit} ({day}; before: {self.before.commit})"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the runs of one identity, in the order of their dates.

    Attributes:
        runs: all runs with a value; those that are set aside are shown, but not analysed.
        points: change points, by the index in `analysed`.
    """

    metric: Quantity
    runs: tuple[HistoryRun, ...]
    analysed: tuple[HistoryRun, ...]
    points: tuple[ChangePoint, ...]

    @property
    def name(self) -> str:
        """Model, precision and a short hash of the identity."""
        newest = self.runs[-1]
        precision = newest.series["quantization"] or newest.series["dtype"]
        return f"{newest.series['model']} ({precision}, series {newest.series_id})"

    @property
    def values(self) -> list[float]:
        """The metric of each analysed run."""
        return [run.values[self.metric.key] for run in self.analysed]

    @property
    def levels(self) -> list[tuple[int, int, float]]:
        """(first index, index behind the last, geometric mean) of every segment of the analysed runs."""
        edges = [0, *(point.index for point in self.points), len(self.analysed)]
        logs = np.log(self.values)
        return [
            (start, end, math.exp(float(logs[start:end].mean())))
            for start, end in pairwise(edges)
            if end > start
        ]

    @property
    def changes(self) -> list[SeriesChange]:
        """Every change point, oldest first."""
        sign = -1 if higher_is_better(self.metric.key) else 1
        levels = [math.log(level) for _, _, level in self.levels]
        return [
            SeriesChange(
                before=self.analysed[point.index - 1],
                after=self.analysed[point.index],
                num_newer=len(self.analysed) - point.index,
                level_before=math.exp(levels[i]),
                level_after=math.exp(levels[i + 1]),
                worse=math.expm1(sign * point.log_ratio),
                since_best=math.expm1(
                    max(sign * (levels[i + 1] - level) for level in levels[: i + 1])
                ),
                pvalue=point.pvalue,
            )
            for i, point in enumerate(self.points)
        ]

    def smallest_visible_change(self, newest: int) -> float | None:
        """The relative change between the last `newest` runs and those before them in their segment that
        would be a change point with a probability of 80 %; None where there are too few runs."""
        start = self.points[-1].index if self.points else 0
        logs = np.log(self.values[start:])
        behind = min(newest, len(logs) // 2)
        if behind < MIN_SEGMENT:
            return None
        compared = max(len(logs) - 2 * MIN_SEGMENT + 1, 1)
        degrees = len(logs) - 2
        reach = student_quantile(1 - MAX_PVALUE / compared / 2, degrees)
        reach += student_quantile(POWER, degrees)
        error = float(logs.std(ddof=1)) * math.sqrt(1 / behind + 1 / (len(logs) - behind))
        return math.expm1(reach * error)


def series_of(runs: Iterable[HistoryRun], metric: Quantity) -> list[Series]:
    """The series of a metric, one for each identity, in the order of their first runs.

    Raises:
        BadInput: a value is zero, so that changes have no ratio.
    """
    by_identity: dict[str, list[HistoryRun]] = {}
    for run in runs:
        if metric.key in run.values:
            by_identity.setdefault(run.series_id, []).append(run)
    return [_series_of_runs(metric, of_identity) for of_identity in by_identity.values()]


def _series_of_runs(metric: Quantity, runs: Sequence[HistoryRun]) -> Series:
    analysed = tuple(run for run in runs if run.set_aside is None)
    values = [run.values[metric.key] for run in analysed]
    if any(value <= 0 for value in values):
        raise BadInput(f"{metric.key} is 0 in some runs: a history needs a metric that is above 0")
    points = tuple(change_points(values)) if values else ()
    return Series(metric, tuple(runs), analysed, points)


def series_dict(series: Series) -> dict[str, Any]:
    """A series as plain values, for `--json`."""
    return {
        "series": series.runs[-1].series_id,
        "identity": series.runs[-1].series,
        "metric": series.metric.key,
        "num_runs": len(series.runs),
        "num_set_aside": len(series.runs) - len(series.analysed),
        "levels": [
            {"first": start, "runs": end - start, "level": level}
            for start, end, level in series.levels
        ],
        "change_points": [
            {
                **{k: v for k, v in asdict(change).items() if k not in ("before", "after")},
                "commit": change.after.commit,
                "commit_before": change.before.commit,
                "run_id": change.after.run_id,
                "date": change.after.date,
            }
            for change in series.changes
        ],
    }


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


@drawn
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
