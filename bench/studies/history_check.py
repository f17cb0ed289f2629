"""Verdict on the newest runs of a history: a regression where they hold a change point for the worse.

A loss counts against the level right before it, and against the best level of the series: several small
losses add up to one beyond the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...quant.base.errors import BadInput
from ..gate.limits import MEASURED, GateOutcome, Limit, Quantity, parse_gate
from ..metrics.metrics import higher_is_better
from ..metrics.run_statistics import HEADLINES
from ..page.page import percent
from ..record.result import plain
from .history_runs import HistoryRun
from .history_series import Series, SeriesChange, series_dict, series_of

WINDOW = 20
MIN_RUNS = 8


@dataclass(frozen=True, slots=True)
class SeriesVerdict:
    """The outcome of one limit on one series."""

    series: Series
    limit: float
    outcome: GateOutcome
    reason: str
    broken_by: SeriesChange | None = None


@dataclass(frozen=True, slots=True)
class HistoryVerdict:
    """The outcome of a check: regression if any series has one, pass if all do."""

    verdicts: tuple[SeriesVerdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> GateOutcome:
        return GateOutcome.of(verdict.outcome for verdict in self.verdicts)

    @property
    def sentence(self) -> str:
        """The reasons of the outcome."""
        reasons = [each.reason for each in self.verdicts if each.outcome is self.outcome]
        return "; ".join(dict.fromkeys(reasons)) or "the history has no runs"

    def as_dict(self) -> dict[str, Any]:
        return plain(
            {
                "outcome": self.outcome.value,
                "exit_code": self.outcome.exit_code,
                "sentence": self.sentence,
                "notes": self.notes,
                "series": [
                    {
                        **series_dict(each.series),
                        "limit": each.limit,
                        "outcome": each.outcome.value,
                        "reason": each.reason,
                        "commit": each.broken_by and each.broken_by.after.commit,
                    }
                    for each in self.verdicts
                ],
            }
        )


def history_limits(gate: str | None, threshold: float) -> dict[Quantity, float]:
    """{metric: how much worse it may get, as a share}: of a gate, or the threshold for four speeds.

    Raises:
        BadInput: a limit on a value itself, or one in the direction in which the metric gets better.
    """
    if gate is None:
        return {MEASURED[key]: threshold for key in HEADLINES}
    limits = {}
    for limit in parse_gate(gate):
        limits[limit.quantity] = _share(limit)
    return limits


def _share(limit: Limit) -> float:
    key = limit.quantity.key
    if not limit.relative:
        raise BadInput(f"gate: {key} {limit.text}: a history limits changes, such as {key}<=+5%")
    if limit.at_most == higher_is_better(key) or (limit.bound < 0) == limit.at_most:
        better = f"{key}>=-5%" if higher_is_better(key) else f"{key}<=+5%"
        raise BadInput(f"gate: {key} {limit.text} does not limit a loss: write {better}")
    return limit.bound if limit.at_most else 1 / (1 + limit.bound) - 1


def check_history(
    runs: Sequence[HistoryRun], limits: Mapping[Quantity, float], *, window: int = WINDOW
) -> HistoryVerdict:
    """Judge the series with runs of the newest commit by the change points in their newest `window` runs.

    Raises:
        BadInput: a metric that none of these runs has.
    """
    if not runs:
        return HistoryVerdict(())
    newest = runs[-1].commit
    current = {run.series_id for run in runs if run.commit == newest} | {runs[-1].series_id}
    several = len(current) > 1
    verdicts = [
        _judge(series, limit, window, f" of {series.name}" if several else "")
        for metric, limit in limits.items()
        for series in series_of([run for run in runs if run.series_id in current], metric)
    ]
    judged = {verdict.series.metric.key for verdict in verdicts}
    if absent := [metric.key for metric in limits if metric.key not in judged]:
        raise BadInput(f"no run of commit {newest} has {', '.join(absent)}")
    others = len({run.series_id for run in runs} - current)
    notes = (f"{others} series without a run of commit {newest} were not judged",) if others else ()
    return HistoryVerdict(tuple(verdicts), notes)


def _judge(series: Series, limit: float, window: int, of_series: str) -> SeriesVerdict:
    """`of_series` names the series in the reason, where there are several."""
    label = f"{series.metric.label}{of_series}"
    changes = [change for change in series.changes if change.num_newer <= window]
    broken = [change for change in changes if change.worse > 0 and loss(change) > limit]
    if broken:
        worst = max(broken, key=loss)
        return SeriesVerdict(series, limit, GateOutcome.REGRESSION, loss_words(label, worst), worst)
    if because := series.runs[-1].set_aside:
        reason = f"the newest run{of_series} was set aside: {because}"
        return SeriesVerdict(series, limit, GateOutcome.NO_VERDICT, reason)
    if len(series.analysed) < MIN_RUNS:
        reason = f"{label} has {len(series.analysed)} runs: {MIN_RUNS} are needed"
        return SeriesVerdict(series, limit, GateOutcome.NO_VERDICT, reason)
    visible = series.smallest_visible_change(window)
    reason = f"{label} has lost no more than {percent(limit)} in its newest {window} runs"
    if visible is not None:
        reason += f" (a change of {percent(visible)} would show)"
    return SeriesVerdict(series, limit, GateOutcome.PASS, reason)


def loss(change: SeriesChange) -> float:
    """The loss that counts: right before the change, or since the best level."""
    return max(change.worse, change.since_best)


def loss_words(label: str, change: SeriesChange) -> str:
    """The change in words: how much, and between which commits."""
    said = f"{label} is {percent(change.worse)} worse since {change.where}"
    if change.since_best > change.worse:
        said += f", and {percent(change.since_best)} worse than its best level"
    return said
