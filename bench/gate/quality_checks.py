"""Judging quality limits by intervals: broken, kept, or undecided, paired by position between two runs.

A limit is broken where the whole 95 % interval is beyond it, kept where the whole interval is within, else
there is no verdict. The interval is over the text: a block bootstrap over its documents or windows. Between
two runs of the same tokens both sides take the same resamples, so that what both find hard cancels; equal
models differ by exactly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ..quality.domains import items_for_limit
from ..quality.summary import CONFIDENCE, Interval, blocks_of, quantile, score_of
from ..record.result import RunData
from .counts import change_between, relative_change, shown
from .limits import SCORED, GateOutcome, Limit, Scored, parse_share
from .verdict import Excess, LimitVerdict


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

    @classmethod
    def parse(
        cls, max_ppl_increase: Any = None, max_kl: float | None = None, min_top1: Any = None
    ) -> QualityGate:
        """The limits as options give them: shares as text or numbers.

        Raises:
            BadInput: an invalid share, or a limit out of range.
        """
        rise, agreement = (
            None if share is None else parse_share(str(share))
            for share in (max_ppl_increase, min_top1)
        )
        return cls(rise, max_kl, agreement)

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


# What a promise is called by its outcome.
PROMISE_WORDS = {
    GateOutcome.PASS: "keeps",
    GateOutcome.REGRESSION: "breaks",
    GateOutcome.NO_VERDICT: "unsure",
}


def check_promises(limits: Sequence[Limit], quality: Mapping[str, Any]) -> list[LimitVerdict]:
    """Check limits on the distance from the original: kept or broken by the whole interval, else undecided.

    Args:
        limits: of `parse_promises`.
        quality: `llmopt.quality` of a run beside its original.
    """
    return [_check_value(limit, quality) for limit in limits]


def _check_value(
    limit: Limit, quality: Mapping[str, Any], base: float | None = None
) -> LimitVerdict:
    """Check a limit on a score itself; a relative one on its ratio to the original's."""
    scored = limit.quantity
    assert isinstance(scored, Scored)
    found = score_of(quality, "perplexity_ratio" if limit.relative else scored.name)
    if found is None:
        said = _missing(scored, "new", quality)
        return LimitVerdict.of(limit, said, base=base, new=None)
    value, interval = found
    # Results of older versions have no intervals: their values are taken as they are.
    low, high = (value, value) if interval is None else interval
    words: Callable[[float], str] = partial(shown, unit=scored.unit)
    if limit.relative:
        value -= 1
        low, high = (None if side is None else side - 1 for side in (low, high))
        words = "{:+.2%}".format
    said = f"{scored.label} is {words(value)}{_between((low, high), words)}"
    undecided = f": the limit {limit.text} is within the interval, score more "
    undecided += "tokens (--quality-tokens)" if scored.is_of_passage else "text or items"
    if scored.key == "flips":
        undecided += f": about {items_for_limit(value, limit.bound):,} would tell"
    sides = {"interval": (low, high), "change": change_between(base, value)}
    evidence = Excess.of(limit, (low, high))
    return LimitVerdict.of(limit, said, evidence, undecided, base=base, new=value, **sides)


def _missing(scored: Scored, side: str, quality: Mapping[str, Any]) -> str:
    said = f"{scored.label} has a limit but no value in the {side} run"
    if scored.column == "nll" or not quality:
        return said
    return said + f": it needs a --reference{'' if scored.is_of_passage else ' and --quality-full'}"


def check_quality(limit: Limit, base: RunData, new: RunData) -> LimitVerdict:
    """Check a limit on a score."""
    scored = limit.quantity
    assert isinstance(scored, Scored)
    before, after = (
        None if (found := score_of(_quality(side), scored.name)) is None else found[0]
        for side in (base, new)
    )
    if not limit.relative:
        return _check_value(limit, _quality(new), before)
    if after is None or before is None:
        side = "new" if after is None else "base"
        said = _missing(scored, side, _quality(base if side == "base" else new))
        return LimitVerdict.of(limit, said, base=before, new=after)
    change = change_of(scored, base, new)
    if isinstance(change, str):
        said = f"{scored.label} has a limit, but {change}"
        return LimitVerdict.of(limit, said, base=before, new=after)
    moved, interval = change
    said = f"{scored.label} went from {shown(before, scored.unit)} to {shown(after, scored.unit)}: "
    said += f"{moved * 100:+.2f} %" + _between(interval, lambda side: f"{side * 100:+.2f} %")
    undecided = (
        f": the limit {limit.text} is within the interval, score more tokens (--quality-tokens)"
    )
    evidence = Excess.of(limit, interval)
    sides = {"base": before, "new": after, "interval": interval, "change": moved}
    return LimitVerdict.of(limit, said, evidence, undecided, **sides)


def change_of(
    scored: Scored, base: RunData, new: RunData
) -> tuple[float, tuple[float, float]] | str:
    """(relative change from base to new, its interval), or why there is none."""
    ours, theirs = _quality(new), _quality(base)
    if ours["token_sha256"] != theirs["token_sha256"]:
        return "the runs scored different tokens: give the same text, protocol and --quality-tokens"
    change = relative_change(theirs[scored.name], ours[scored.name])
    assert scored.column is not None
    columns = [
        None if side.series is None else side.series.column(scored.column) for side in (base, new)
    ]
    before, after = columns
    if before is None or after is None or new.series is None:
        if change == 0 or not (ours.get("intervals") and theirs.get("intervals")):
            return change, (change, change)
        return "a run has no quality.parquet beside its result, so that positions cannot be paired"
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
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(changes, [tail, 1 - tail], method="inverted_cdf")
    return relative_change(*values), (float(low), float(high))


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
    values = {
        key: [None if found is None else found[0] for found in sides]
        for key, scored in SCORED.items()
        if scored.is_felt and (sides := [score_of(side, scored.name) for side in (theirs, ours)])[1]
    }
    if values:
        changes["felt"] = values
    if theirs:
        change = change_of(SCORED["perplexity"], base, new)
        if not isinstance(change, str):
            changes["perplexity_change"], interval = change
            if interval[0] != interval[1]:
                changes["perplexity_change_interval"] = list(interval)
        elif ours["token_sha256"] == theirs["token_sha256"]:
            changes["perplexity_change"] = ours["perplexity"] / theirs["perplexity"] - 1
    return changes


def _quality(run: RunData) -> Mapping[str, Any]:
    return run.result["llmopt"]["quality"] or {}


def _between(interval: Interval, words: Callable[[float], str]) -> str:
    low, high = interval
    if low == high:
        return ""
    sides = ("unbounded" if side is None else words(side) for side in (low, high))
    return f" ({' to '.join(sides)})"
