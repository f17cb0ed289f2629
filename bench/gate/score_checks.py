"""Judging scores: quality by position, tasks by item. The interval decides: broken, kept or undecided.

A limit is broken if the whole 95 % interval is beyond it, kept if the whole interval is within, else there is
no verdict. The interval is over the text, a block bootstrap over its documents or windows, or over the items,
as draws from all that the task could ask: McNemar's exact test and Tango's interval for 0/1 scores, a paired
bootstrap for others. Between two runs both sides take the same resamples, so that what both find hard
cancels; runs with equal scores or responses differ by exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from ..metrics.statistics import CONFIDENCE, POWER, central_interval
from ..quality.domains import exact_interval, items_for_limit, items_for_loss
from ..quality.summary import blocks_of, quantile, score_of
from ..quality.task_items import (
    Aggregation,
    ItemScores,
    aggregate,
    bootstrap_interval,
    mcnemar_exact,
    tango_interval,
    wilson_interval,
)
from ..record.result import RunData
from .counts import change_between, relative_change, shown
from .limits import PREFIX, SCORED, Limit, Scored, TaskScored, scores_in
from .verdict import Excess, LimitVerdict, between

WITHIN = "is within the interval, score more"


def check_promises(
    limits: Sequence[Limit], quality: Mapping[str, Any], runs: tuple[RunData, RunData] | None = None
) -> list[LimitVerdict]:
    """Check the limits of `parse_promises` on `llmopt.quality` of a run next to its original, those on tasks
    on the `runs` of both."""
    return [
        check_task(limit, *runs)
        if runs is not None and isinstance(limit.quantity, TaskScored)
        else _check_value(limit, quality)
        for limit in limits
    ]


def _check_value(
    limit: Limit, quality: Mapping[str, Any], base: float | None = None
) -> LimitVerdict:
    """Check a limit on a score itself, or a relative limit on its ratio to the original's."""
    scored = limit.quantity
    assert isinstance(scored, Scored)
    score = score_of(quality, "perplexity_ratio" if limit.relative else scored.name)
    if score is None:
        return LimitVerdict.of(limit, _missing(scored, "new", quality), base=base, new=None)
    value, interval = score
    # Results of older versions have no intervals: their values are taken as they are.
    low, high = (value, value) if interval is None else interval
    format_value: Callable[[float], str] = partial(shown, unit=scored.unit)
    if limit.relative:
        value -= 1
        low, high = (None if side is None else side - 1 for side in (low, high))
        format_value = "{:+.2%}".format
    text = f"{scored.label} is {format_value(value)}{between((low, high), format_value)}"
    undecided = f": the limit {limit.text} {WITHIN} "
    more = {"": "tokens (--quality-tokens)", "--quality-full": "text or items"}
    undecided += more.get(scored.option, "documents (--quality-documents)")
    if scored.key == "flips":
        undecided += f": about {items_for_limit(value, limit.bound):,} would tell"
    sides = {"interval": (low, high), "change": change_between(base, value)}
    evidence = Excess.of(limit, (low, high))
    return LimitVerdict.of(limit, text, evidence, undecided, base=base, new=value, **sides)


def _missing(scored: Scored, side: str, quality: Mapping[str, Any]) -> str:
    text = f"{scored.label} has a limit but no value in the {side} run"
    if scored.column == "nll" or not quality:
        return text
    if scored.name.startswith("kv."):
        return text + f": it needs {scored.option}"
    return text + f": it needs a --reference{f' and {scored.option}' if scored.option else ''}"


def check_quality(limit: Limit, base: RunData, new: RunData) -> LimitVerdict:
    scored = limit.quantity
    assert isinstance(scored, Scored)
    scores = [score_of(_quality(side), scored.name) for side in (base, new)]
    before, after = (None if score is None else score[0] for score in scores)
    if not limit.relative:
        return _check_value(limit, _quality(new), before)
    if after is None or before is None:
        side, run = ("new", new) if after is None else ("base", base)
        text = _missing(scored, side, _quality(run))
        return LimitVerdict.of(limit, text, base=before, new=after)
    change = _quality_change(scored, base, new)
    if isinstance(change, str):
        text = f"{scored.label} has a limit, but {change}"
        return LimitVerdict.of(limit, text, base=before, new=after)
    moved, interval = change
    text = f"{scored.label} went from {shown(before, scored.unit)} to {shown(after, scored.unit)}: "
    text += f"{moved * 100:+.2f} %" + between(interval, lambda side: f"{side * 100:+.2f} %")
    undecided = f": the limit {limit.text} {WITHIN} tokens (--quality-tokens)"
    evidence = Excess.of(limit, interval)
    sides = {"base": before, "new": after, "interval": interval, "change": moved}
    return LimitVerdict.of(limit, text, evidence, undecided, **sides)


def _quality_change(
    scored: Scored, base: RunData, new: RunData
) -> tuple[float, tuple[float, float]] | str:
    """(relative change from base to new, its interval), or the reason that there is none."""
    ours, theirs = _quality(new), _quality(base)
    if ours["token_sha256"] != theirs["token_sha256"]:
        return "the runs scored different tokens: give the same text, protocol and --quality-tokens"
    change = relative_change(theirs[scored.name], ours[scored.name])
    assert scored.column is not None
    before, after = (
        None if side.series is None else side.series.column(scored.column) for side in (base, new)
    )
    if before is None or after is None or new.series is None:
        if change == 0 or not (ours.get("intervals") and theirs.get("intervals")):
            return change, (change, change)
        return "a run has no quality.parquet next to its result, so that positions cannot be paired"
    if len(before) != len(after):
        return "the quality.parquet of the runs have different numbers of positions"
    if np.array_equal(before, after):
        return 0.0, (0.0, 0.0)
    blocks = blocks_of(new.series)
    before, after = before.astype(np.float64), after.astype(np.float64)
    if scored.column == "nll":
        low, high = blocks.exp_mean(after - before)
        assert low is not None and high is not None
        return math.expm1((after - before).mean()), (low - 1, high - 1)
    if scored.quantile is None:
        resampled = [blocks.resampled_means(column) for column in (before, after)]
        values = float(before.mean()), float(after.mean())
    else:
        share = scored.quantile
        resampled = [blocks.resampled_quantiles(column, share) for column in (before, after)]
        values = quantile(before, share), quantile(after, share)
    changes = [relative_change(float(b), float(a)) for b, a in zip(*resampled, strict=True)]
    return relative_change(*values), central_interval(changes, method="inverted_cdf")


def quality_changes(base: RunData, new: RunData) -> dict[str, Any]:
    """Perplexity, KL divergence and top-1 agreement of base and new, for readers; empty without a score."""
    ours, theirs = _quality(new), _quality(base)
    if not ours:
        return {}
    changes: dict[str, Any] = {
        "perplexity": [theirs.get("perplexity"), ours["perplexity"]],
        "perplexity_change": None,
        "perplexity_change_interval": None,
        "kl_nats": ours["kl_nats"],
        "top1_agreement": ours["top1_agreement"],
        "base_kl_nats": theirs.get("kl_nats"),
        "base_top1_agreement": theirs.get("top1_agreement"),
        "reference": ours["reference"],
    }
    values = {}
    for scored in scores_in(ours):
        scores = [score_of(side, scored.name) for side in (theirs, ours)]
        if scored.is_felt and scores[1]:
            values[scored.key] = [None if score is None else score[0] for score in scores]
    if values:
        changes["felt"] = values
    if theirs:
        change = _quality_change(SCORED["perplexity"], base, new)
        if not isinstance(change, str):
            changes["perplexity_change"], interval = change
            if interval[0] != interval[1]:
                changes["perplexity_change_interval"] = list(interval)
        elif ours["token_sha256"] == theirs["token_sha256"]:
            changes["perplexity_change"] = ours["perplexity"] / theirs["perplexity"] - 1
    return changes


def _quality(run: RunData) -> Mapping[str, Any]:
    return run.result["llmopt"]["quality"] or {}


@dataclass(frozen=True, slots=True)
class TaskChange:
    """The relative change of one task score between two runs, with its interval; `lost` and `gained` are
    items that only one run has right, for scores of 0 and 1, with McNemar's p-value; `flipped` are
    multiple-choice items with another answer."""

    key: str
    base: float
    new: float
    change: float
    interval: tuple[float, float]
    num_items: int
    lost: int | None = None
    gained: int | None = None
    p_value: float | None = None
    flipped: int | None = None

    def items_for(self, change: float) -> int:
        """Items that tell a relative change from none, at 95 % and with a power of 80 %: by McNemar's test
        for scores of 0 and 1, else by the width of the interval."""
        if self.lost is not None and self.gained is not None:
            changed = (self.lost + self.gained) / self.num_items
            return items_for_loss(change * self.base, changed)
        normal = NormalDist()
        z = normal.inv_cdf((1 + CONFIDENCE) / 2)
        error = (self.interval[1] - self.interval[0]) / (2 * z)
        return math.ceil(self.num_items * ((z + normal.inv_cdf(POWER)) * error / change) ** 2)

    @property
    def words(self) -> str:
        if self.lost is None or self.p_value is None:
            return f"{self.num_items:,} items, paired bootstrap"
        flips = "" if self.flipped is None else f", {self.flipped} answers changed"
        return (
            f"{self.num_items:,} items, {self.lost} lost and {self.gained} gained, McNemar p = "
            f"{self.p_value:.3g}{flips}"
        )


def check_task(limit: Limit, base: RunData, new: RunData) -> LimitVerdict:
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
    row, moved, enough = rows[1], change_between(before, after), ""
    assert isinstance(row, dict)
    if limit.relative:
        change = _task_change(scored, base, new)
        if isinstance(change, str):
            return unknown(f", but {change}")
        moved, interval = change.change, change.interval
        if limit.bound and change.base:
            enough = f": about {change.items_for(abs(limit.bound)):,} tell it from no change"
        sides = " to ".join(f"{side * 100:+.2f} %" for side in interval)
        text = f"{scored.label} went from {shown(change.base, '')} to {shown(change.new, '')}: "
        text += f"{moved * 100:+.2f} % ({sides}; {change.words})" if change.base else change.words
    else:
        items = _items(new, row)
        if items is None:
            return unknown(", but its scores per item are not known")
        if items.is_binary:
            interval = wilson_interval(int(items.values.sum()), len(items.values))
        else:
            interval = bootstrap_interval(row["aggregation"], items.weights, items.values)
        low, high = (shown(side, "") for side in interval)
        text = f"{scored.label} is {shown(row['value'], '')} ({low} to {high})"
    undecided = f": the limit {limit.text} {WITHIN} items (--tasks-limit){enough}"
    evidence = Excess.of(limit, interval)
    sides = {"base": before, "new": after, "interval": interval, "change": moved}
    return LimitVerdict.of(limit, text, evidence, undecided, **sides)


def _check_flips(limit: Limit, scored: TaskScored, base: RunData, new: RunData) -> LimitVerdict:
    """Check a limit on the answers of a multiple-choice task that differ between the runs."""
    task = scored.label.removesuffix(".flips")
    changes = _changes(base, new, task)
    counts = [(c, c.flipped) for c in changes if not isinstance(c, str) and c.flipped is not None]
    if not counts:
        reasons = [change for change in changes if isinstance(change, str)]
        why = "it has no multiple-choice items" if changes else "it was not scored"
        text = f"{scored.key} has a limit but no value: {reasons[0] if reasons else why}"
        return LimitVerdict.of(limit, text, base=None, new=None)
    change, flipped = counts[0]
    num_items, is_alike = change.num_items, change.interval == (0, 0) and not flipped
    interval = (0.0, 0.0) if is_alike else exact_interval(flipped, num_items)
    share = flipped / num_items
    low, high = (f"{side:.2%}" for side in interval)
    text = f"{flipped} of {num_items:,} answers of {task} changed: {share:.2%} ({low} to {high})"
    undecided = f": the limit {limit.text} is within the interval: about "
    undecided += f"{items_for_limit(share, limit.bound):,} items would tell"
    sides = {"base": None, "new": share, "interval": interval}
    return LimitVerdict.of(limit, text, Excess.of(limit, interval), undecided, **sides)


def task_changes(base: RunData, new: RunData) -> tuple[TaskChange, ...]:
    """The changes of all scores that both runs have by item, in the order of the new run."""
    return tuple(change for change in _changes(base, new) if not isinstance(change, str))


def _changes(base: RunData, new: RunData, task: str | None = None) -> list[TaskChange | str]:
    """The change of each score of the new run, of one task or all, or the reason that it has none."""
    rows = (new.result["llmopt"].get("tasks") or {"metrics": []})["metrics"]
    keys = (
        f"{PREFIX}{row['task']}.{row['metric']}.{row['filter']}"
        for row in rows
        if task in (None, row["task"])
    )
    return [_task_change(TaskScored(key), base, new) for key in keys]


def _task_change(scored: TaskScored, base: RunData, new: RunData) -> TaskChange | str:
    """The relative change from base to new with its interval, or the reason that there is none."""
    before, after = (_row(scored, side) for side in (base, new))
    if isinstance(before, str) or isinstance(after, str):
        return str(before if isinstance(before, str) else after)
    for key, name in (("version", "version"), ("num_fewshot", "number of shots")):
        if before[key] != after[key]:
            return f"the {name} differs between the runs: {before[key]} and {after[key]}"
    protocols = [side.result["llmopt"]["tasks"]["protocol"] for side in (base, new)]
    if protocols[0] != protocols[1]:
        return f"the runs asked in different ways: {protocols[0]} | {protocols[1]}"
    old, now = _items(base, before), _items(new, after)
    if old is None or now is None:
        return "its scores per item are not known (tasks.parquet): items cannot be paired"
    if old.keys != now.keys:
        return "the runs have different items: give the same task, data and --tasks-limit"
    return _change_of_items(scored.key, after["aggregation"], old, now)


def _change_of_items(
    key: str, aggregation: Aggregation, before: ItemScores, after: ItemScores
) -> TaskChange:
    old, new = (
        float(aggregate(aggregation, side.values, side.weights)) for side in (before, after)
    )
    count = len(after.values)
    change = new / old - 1 if old else (0.0 if new == old else float("inf"))
    alike = before.responses == after.responses and np.array_equal(before.values, after.values)
    alike = alike and np.array_equal(before.weights, after.weights)
    interval = (0.0, 0.0)
    if not (before.is_binary and after.is_binary):
        if not alike:
            sides = after.weights, after.values, before.values, before.weights
            interval = bootstrap_interval(aggregation, *sides)
        return TaskChange(key, old, new, change, interval, count)
    lost = int((before.values > after.values).sum())
    gained = int((before.values < after.values).sum())
    if not alike:
        low, high = tango_interval(lost, gained, count)
        # A limit is a share of the base's score, which is taken as it is: of 0 any sure change is beyond all.
        unknown = (float("inf") if low > 0 else -float("inf"), float("inf"))
        interval = (low / old, high / old) if old else unknown
    p_value, flipped = mcnemar_exact(lost, gained), None
    if before.answers is not None and after.answers is not None:
        flipped = int((before.answers != after.answers).sum())
    return TaskChange(key, old, new, change, interval, count, lost, gained, p_value, flipped)


def _row(scored: TaskScored, run: RunData) -> dict[str, Any] | str:
    record: Mapping[str, Any] | None = run.result["llmopt"].get("tasks")
    if record is None:
        return "it scored no tasks (--tasks)"
    if record["error"] is not None:
        return f"its tasks failed: {record['error']}"
    return scored.row(record)


def _items(run: RunData, row: Mapping[str, Any]) -> ItemScores | None:
    if run.items is None or row.get("aggregation") is None:
        return None
    return run.items.of(row["task"], row["metric"], row["filter"])
