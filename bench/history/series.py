"""Series of a history: the values of one metric over the runs of one identity, and their change points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ...quant.base.errors import BadInput
from ..gate.gate import Quantity
from ..metrics.direction import higher_is_better
from ..metrics.statistics import student_quantile
from .change_points import MAX_PVALUE, MIN_SEGMENT, ChangePoint, change_points
from .run import HistoryRun

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
        """Of the analysed runs."""
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
    return [_series(metric, of_identity) for of_identity in by_identity.values()]


def _series(metric: Quantity, runs: Sequence[HistoryRun]) -> Series:
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
