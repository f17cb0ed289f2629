"""Judging task scores item by item: McNemar's exact test and Tango's interval for 0/1 scores, a paired
bootstrap for others.

A limit is broken where the whole 95 % interval is beyond it, kept where the whole interval is within, else
there is no verdict. The interval is over the items, as draws from all that the task could ask; runs that
respond to every item alike differ by exactly nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..quality.domains import exact_interval, items_for_limit
from ..quality.task_items import (
    Aggregation,
    Interval,
    ItemScores,
    aggregate,
    bootstrap_interval,
    mcnemar_exact,
    tango_interval,
    wilson_interval,
)
from ..record.result import RunData
from .counts import change_between, shown
from .limits import PREFIX, Limit, TaskScored
from .verdict import Excess, LimitVerdict


@dataclass(frozen=True, slots=True)
class TaskChange:
    """The change of one task score between two runs.

    Attributes:
        change: relative, as in a gate; `interval` bounds it.
        lost, gained: items that only one run has right; None where scores are not 0 or 1.
        p_value: of McNemar's exact test.
        flipped: items whose answer changed; None where items are not multiple-choice.
    """

    key: str
    base: float
    new: float
    change: float
    interval: Interval
    num_items: int
    lost: int | None = None
    gained: int | None = None
    p_value: float | None = None
    flipped: int | None = None

    @property
    def words(self) -> str:
        """The items behind the change."""
        if self.lost is None or self.p_value is None:
            return f"{self.num_items:,} items, paired bootstrap"
        flips = "" if self.flipped is None else f", {self.flipped} answers changed"
        return (
            f"{self.num_items:,} items, {self.lost} lost and {self.gained} gained, McNemar p = "
            f"{self.p_value:.3g}{flips}"
        )


def check_task(limit: Limit, base: RunData, new: RunData) -> LimitVerdict:
    """Check a limit on a task score."""
    scored = limit.quantity
    assert isinstance(scored, TaskScored)
    if scored.is_flips:
        return _check_flips(limit, scored, base, new)
    rows = _row(scored, base), _row(scored, new)
    before, after = (None if isinstance(row, str) else row["value"] for row in rows)

    def unknown(why: str) -> LimitVerdict:
        return LimitVerdict.of(limit, f"{scored.key} has a limit{why}", base=before, new=after)

    for side, row in zip(("base", "new"), rows, strict=True):
        if isinstance(row, str) and (side == "new" or limit.relative):
            return unknown(f" but no value in the {side} run: {row}")
    row, moved = rows[1], change_between(before, after)
    assert isinstance(row, dict)
    if limit.relative:
        change = change_of(scored, base, new)
        if isinstance(change, str):
            return unknown(f", but {change}")
        moved, interval = change.change, change.interval
        said = (
            f"{scored.label} went from {shown(change.base, '')} to {shown(change.new, '')}: "
            f"{change.change * 100:+.2f} % ({_sides(interval)}; {change.words})"
        )
    else:
        items = _items(new, row)
        if items is None:
            return unknown(", but its scores per item are not known")
        interval = value_interval(row["aggregation"], items)
        low, high = (shown(side, "") for side in interval)
        said = f"{scored.label} is {shown(row['value'], '')} ({low} to {high})"
    undecided = f": the limit {limit.text} is within the interval, score more items (--tasks-limit)"
    evidence = Excess.of(limit, interval)
    sides = {"base": before, "new": after, "interval": interval, "change": moved}
    return LimitVerdict.of(limit, said, evidence, undecided, **sides)


def _check_flips(limit: Limit, scored: TaskScored, base: RunData, new: RunData) -> LimitVerdict:
    """Check a limit on the answers of a multiple-choice task that differ between the runs."""
    task = scored.label.removesuffix(".flips")
    record = new.result["llmopt"].get("tasks") or {"metrics": []}
    rows = [row for row in record["metrics"] if row["task"] == task]
    keys = (f"{PREFIX}{task}.{row['metric']}.{row['filter']}" for row in rows)
    changes = [change_of(TaskScored(key), base, new) for key in keys]
    found = next(
        (one for one in changes if isinstance(one, TaskChange) and one.flipped is not None), None
    )
    if found is None or found.flipped is None:
        why = [one for one in changes if isinstance(one, str)] or [
            "it has no multiple-choice items"
        ]
        said = f"{scored.key} has a limit but no value: {why[0] if rows else 'it was not scored'}"
        return LimitVerdict.of(limit, said, base=None, new=None)
    alike = found.interval == (0.0, 0.0) and not found.flipped
    interval = (0.0, 0.0) if alike else exact_interval(found.flipped, found.num_items)
    share = found.flipped / found.num_items
    low, high = (f"{side:.2%}" for side in interval)
    said = f"{found.flipped} of {found.num_items:,} answers of {task} changed: {share:.2%} ({low} to {high})"
    undecided = f": the limit {limit.text} is within the interval: about "
    undecided += f"{items_for_limit(share, limit.bound):,} items would tell"
    evidence = Excess.of(limit, interval)
    return LimitVerdict.of(
        limit, said, evidence, undecided, base=None, new=share, interval=interval
    )


def task_changes(base: RunData, new: RunData) -> tuple[TaskChange, ...]:
    """The changes of all scores that both runs have by item, in the order of the new run."""
    record = new.result["llmopt"].get("tasks") or {"metrics": []}
    keys = [
        TaskScored(f"{PREFIX}{row['task']}.{row['metric']}.{row['filter']}")
        for row in record["metrics"]
    ]
    changes = [change_of(scored, base, new) for scored in keys if _has(scored, base)]
    return tuple(change for change in changes if not isinstance(change, str))


def change_of(scored: TaskScored, base: RunData, new: RunData) -> TaskChange | str:
    """The relative change from base to new with its interval, or why there is none."""
    before, after = (_row(scored, side) for side in (base, new))
    if isinstance(before, str) or isinstance(after, str):
        return str(before if isinstance(before, str) else after)
    for key, name in (("version", "version"), ("num_fewshot", "number of shots")):
        if before[key] != after[key]:
            return f"the {name} differs between the runs: {before[key]} and {after[key]}"
    protocols = [side.result["llmopt"]["tasks"]["protocol"] for side in (base, new)]
    if protocols[0] != protocols[1]:
        return f"the runs asked in different ways: {protocols[0]} | {protocols[1]}"
    items = [_items(side, row) for side, row in ((base, before), (new, after))]
    old, now = items
    if old is None or now is None:
        return "its scores per item are not known (tasks.parquet): items cannot be paired"
    if old.keys != now.keys:
        return "the runs have different items: give the same task, data and --tasks-limit"
    return _change(scored, after["aggregation"], old, now)


def _change(
    scored: TaskScored, aggregation: Aggregation, before: ItemScores, after: ItemScores
) -> TaskChange:
    old, new = (
        float(aggregate(aggregation, side.values, side.weights)) for side in (before, after)
    )
    count = len(after.values)
    change = new / old - 1 if old else (0.0 if new == old else float("inf"))
    alike = before.responses == after.responses and np.array_equal(before.values, after.values)
    interval = (0.0, 0.0)
    if not (before.is_binary and after.is_binary):
        if not alike:
            interval = bootstrap_interval(aggregation, after.weights, after.values, before.values)
        return TaskChange(scored.key, old, new, change, interval, count)
    lost = int((before.values > after.values).sum())
    gained = int((before.values < after.values).sum())
    if not alike:
        low, high = tango_interval(lost, gained, count)
        # A limit is a share of the base's score, which is taken as it is.
        interval = (low / old, high / old) if old else (-float("inf"), float("inf"))
    p_value = mcnemar_exact(lost, gained)
    answers = before.answers, after.answers
    flipped = (
        None if answers[0] is None or answers[1] is None else int((answers[0] != answers[1]).sum())
    )
    return TaskChange(scored.key, old, new, change, interval, count, lost, gained, p_value, flipped)


def value_interval(aggregation: Aggregation, items: ItemScores) -> Interval:
    """The interval of one run's score."""
    if items.is_binary:
        return wilson_interval(int(items.values.sum()), len(items.values))
    return bootstrap_interval(aggregation, items.weights, items.values)


def _row(scored: TaskScored, run: RunData) -> dict[str, Any] | str:
    record: Mapping[str, Any] | None = run.result["llmopt"].get("tasks")
    if record is None:
        return "it scored no tasks (--tasks)"
    if record["error"] is not None:
        return f"its tasks failed: {record['error']}"
    return scored.row(record)


def _has(scored: TaskScored, run: RunData) -> bool:
    return not isinstance(_row(scored, run), str)


def _items(run: RunData, row: Mapping[str, Any]) -> ItemScores | None:
    if run.items is None or row.get("aggregation") is None:
        return None
    return run.items.of(row["task"], row["metric"], row["filter"])


def _sides(interval: Interval) -> str:
    return " to ".join(f"{side * 100:+.2f} %" for side in interval)
