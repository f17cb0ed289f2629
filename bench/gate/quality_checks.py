"""Judging quality limits by intervals: broken, kept, or undecided, paired by position between two runs.

A limit is broken where the whole 95 % interval is beyond it, kept where the whole interval is within, else
there is no verdict. The interval is over the text: a block bootstrap over its documents or windows. Between
two runs of the same tokens both sides take the same resamples, so that what both find hard cancels; equal
models differ by exactly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...quant.base.errors import BadInput
from ..quality.summary import CONFIDENCE, Interval, blocks_of, quantile
from ..record.result import RunData
from .counts import Check, relative_change, shown
from .limits import SCORED, Limit, Outcome, Scored


@dataclass(frozen=True, slots=True)
class QualityGate:
    """Limits on quality; None is no limit.

    Attributes:
        max_perplexity_increase: relative, against the base.
        max_kl: nats from the reference of the new run.
        min_top1: fraction of positions.
    """

    max_perplexity_increase: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None

    def __post_init__(self) -> None:
        if self.max_kl is not None and not 0 <= self.max_kl < math.inf:
            raise BadInput(f"the highest KL divergence is {self.max_kl}: give nats, such as 0.02")
        if self.min_top1 is not None and self.min_top1 > 1:
            raise BadInput(f"the least top-1 agreement is {self.min_top1:.0%}: give at most 100%")

    @property
    def limits(self) -> list[Limit]:
        """The same as limits of a gate."""
        given = (
            ("perplexity", True, self.max_perplexity_increase, True),
            ("kl", True, self.max_kl, False),
            ("top1", False, self.min_top1, False),
        )
        return [
            Limit(SCORED[key], at_most, bound, relative)
            for key, at_most, bound, relative in given
            if bound is not None
        ]


@dataclass(frozen=True, slots=True)
class _Value:
    """A score or its change, with its interval; None is unbounded."""

    value: float
    interval: Interval


def check_quality(limit: Limit, base: RunData, new: RunData) -> Check:
    """Check a limit on a score."""
    scored = limit.quantity
    assert isinstance(scored, Scored)
    before, after = (_quality(side).get(scored.name) for side in (base, new))
    words = (scored.key, scored.label, scored.unit, before, after, limit.text)
    if after is None or (limit.relative and before is None):
        side = "new" if after is None else "base"
        reason = f"{scored.label} has a limit but no value in the {side} run"
        if scored.column != "nll" and _quality(base if side == "base" else new):
            reason += ": it needs a --reference"
        return Check(*words, Outcome.NO_VERDICT, reason)
    if not limit.relative:
        interval = (_quality(new).get("intervals") or {}).get(scored.name)
        # Results of older versions have no intervals: their values are taken as they are.
        value = _Value(after, (after, after) if interval is None else tuple(interval))
        said = f"{scored.label} is {shown(after, scored.unit)}"
        said += _between(value, lambda side: shown(side, scored.unit))
    else:
        value = change_of(scored, base, new)
        if isinstance(value, str):
            return Check(*words, Outcome.NO_VERDICT, f"{scored.label} has a limit, but {value}")
        said = f"{scored.label} went from {shown(before or 0.0, scored.unit)} to "
        said += f"{shown(after, scored.unit)}: {value.value * 100:+.2f} %"
        said += _between(value, lambda side: f"{side * 100:+.2f} %")
    outcome = outcome_of(limit, value.interval)
    if outcome is Outcome.REGRESSION:
        said += f", beyond the limit {limit.text}"
    elif outcome is Outcome.NO_VERDICT:
        said += (
            f": the limit {limit.text} is within the interval, score more tokens (--quality-tokens)"
        )
    return Check(*words, outcome, said, value.interval)


def change_of(scored: Scored, base: RunData, new: RunData) -> _Value | str:
    """The relative change from base to new with its interval, or why there is none."""
    ours, theirs = _quality(new), _quality(base)
    if ours["token_sha256"] != theirs["token_sha256"]:
        return "the runs scored different tokens: give the same text, protocol and --quality-tokens"
    change = relative_change(theirs[scored.name], ours[scored.name])
    columns = [
        None if side.series is None else side.series.column(scored.column) for side in (base, new)
    ]
    before, after = columns
    if before is None or after is None or new.series is None:
        if change == 0 or not (ours.get("intervals") and theirs.get("intervals")):
            return _Value(change, (change, change))
        return "a run has no quality.parquet beside its result, so that positions cannot be paired"
    if len(before) != len(after):
        return "the quality.parquet of the runs have different numbers of positions"
    if np.array_equal(before, after):
        return _Value(0.0, (0.0, 0.0))
    blocks = blocks_of(new.series)
    before, after = before.astype(np.float64), after.astype(np.float64)
    if scored.column == "nll":
        low, high = blocks.exp_mean(after - before)
        assert low is not None and high is not None
        return _Value(math.expm1((after - before).mean()), (low - 1, high - 1))
    if scored.quantile is None:
        resampled = [blocks.resampled_means(column) for column in (before, after)]
        values = float(before.mean()), float(after.mean())
    else:
        share = scored.quantile
        resampled = [blocks.resampled_quantiles(column, share) for column in (before, after)]
        values = quantile(before, share), quantile(after, share)
    changes = [relative_change(float(b), float(a)) for b, a in zip(*resampled, strict=True)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(changes, [tail, 1 - tail], method="inverted_cdf")
    return _Value(relative_change(*values), (float(low), float(high)))


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
        "reference": ours["reference"],
    }
    if theirs:
        value = change_of(SCORED["perplexity"], base, new)
        if not isinstance(value, str):
            changes["perplexity_change"] = value.value
            if value.interval[0] != value.interval[1]:
                changes["perplexity_change_interval"] = list(value.interval)
        elif ours["token_sha256"] == theirs["token_sha256"]:
            changes["perplexity_change"] = ours["perplexity"] / theirs["perplexity"] - 1
    return changes


def _quality(run: RunData) -> Mapping[str, Any]:
    return run.result["llmopt"]["quality"] or {}


def outcome_of(limit: Limit, interval: Interval) -> Outcome:
    """Broken where the whole interval is beyond the limit, kept where the whole interval is within."""
    low, high = (
        -math.inf if interval[0] is None else interval[0],
        math.inf if interval[1] is None else interval[1],
    )
    if not limit.at_most:
        low, high = -high, -low
    bound = limit.bound if limit.at_most else -limit.bound
    if high <= bound:
        return Outcome.PASS
    return Outcome.REGRESSION if low > bound else Outcome.NO_VERDICT


def _between(value: _Value, words: Callable[[float], str]) -> str:
    low, high = value.interval
    if low == high:
        return ""
    sides = ("unbounded" if side is None else words(side) for side in (low, high))
    return f" ({' to '.join(sides)})"
