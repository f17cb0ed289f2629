"""Verdict of a limit: what was found, the evidence of how far it is beyond the limit, and what follows.

A limit is broken where the evidence shows the new side beyond it, kept where it shows it within, and else
undecided. Excess is worsening minus what the limit allows: positive is beyond it. Evidence is an interval of
the excess (passes of single runs, paired items and positions, exact values), the tails of a test at the limit
(counts), or the excess of each pair of starts, for a sequential test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Self

import numpy as np

from .limits import GateOutcome, Limit
from .sequential import CODES, FALSE_PASS, FALSE_REGRESSION, SequentialPlan, decide

Interval = tuple[float | None, float | None]
"""Bounds of a value; None is unbounded."""

POWER = 0.8
# Beyond this many times the pairs at hand, the change is as good as at the limit.
MOST_TIMES_AS_MANY = 30
# With fewer pairs the signed-rank interval at 5 % a side is unbounded.
MIN_PAIRS = 5


@dataclass(frozen=True, slots=True)
class Excess:
    """Bounds of the excess: above `low` up to the error of a false regression, and not above `high` up to
    that of a false pass."""

    low: float
    high: float

    @property
    def outcome(self) -> GateOutcome:
        if self.low > 0:
            return GateOutcome.REGRESSION
        return GateOutcome.PASS if self.high <= 0 else GateOutcome.NO_VERDICT

    @classmethod
    def of(cls, limit: Limit, interval: Interval) -> Excess:
        """The excess of a value that is known up to an interval; twice the same number is exact."""
        low = -math.inf if interval[0] is None else interval[0]
        high = math.inf if interval[1] is None else interval[1]
        if limit.at_most:
            return cls(low - limit.bound, high - limit.bound)
        return cls(limit.bound - high, limit.bound - low)


@dataclass(frozen=True, slots=True)
class Tails:
    """Probabilities of a value as high, and as low, as the new side's, were it exactly at the limit; high is
    worse."""

    as_high: float
    as_low: float

    @property
    def outcome(self) -> GateOutcome:
        if self.as_low <= FALSE_PASS:
            return GateOutcome.PASS
        return (
            GateOutcome.REGRESSION if self.as_high <= FALSE_REGRESSION else GateOutcome.NO_VERDICT
        )


@dataclass(frozen=True, slots=True)
class PairedExcess:
    """The excess of each pair of starts, in order, and the plan of the sequential test."""

    excess: np.ndarray
    plan: SequentialPlan

    @property
    def decided(self) -> tuple[GateOutcome, int]:
        """The outcome, and after how many pairs it was reached."""
        code, pairs = decide(self.excess, self.plan)
        return CODES[int(code)], int(pairs)

    @property
    def outcome(self) -> GateOutcome:
        return self.decided[0]


Evidence = Excess | Tails | PairedExcess


@dataclass(frozen=True, slots=True)
class LimitVerdict:
    """The outcome of one limit, with what it is based on and its sentence; `limit` is in gate syntax.

    Attributes:
        interval: of a count or score, or of its change where the limit is relative, with 95 % confidence.
        change: relative to the base; None without two values.
    """

    key: str
    label: str
    unit: str
    base: float | None
    new: float | None
    limit: str
    outcome: GateOutcome
    reason: str
    interval: Interval | None = None
    change: float | None = None

    @property
    def name(self) -> str:
        """The quantity with its limit."""
        return f"{self.label} {self.limit}"

    @classmethod
    def of(
        cls,
        limit: Limit,
        said: str,
        evidence: Evidence | None = None,
        undecided: str = "",
        **found: Any,
    ) -> Self:
        """The verdict that the evidence gives on a limit, with its sentence; no evidence is no verdict.

        Args:
            said: the value or its change as a clause; without evidence, why there is none.
            undecided: how the sentence goes on where the evidence does not tell.
            found: the other fields.
        """
        outcome = GateOutcome.NO_VERDICT if evidence is None else evidence.outcome
        if outcome is GateOutcome.REGRESSION:
            said += f", beyond the limit {limit.text}"
        elif outcome is GateOutcome.NO_VERDICT:
            said += undecided
        what = limit.quantity
        names = {"key": what.key, "label": what.label, "unit": what.unit}
        return cls(**names, limit=limit.text, outcome=outcome, reason=said, **found)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredVerdict(LimitVerdict):
    """The outcome of a limit on a measured metric.

    Attributes:
        change: relative to the base; `low` and `high` bound it with 90 % confidence (95 % on each side).
        worse: the same as a slowdown: positive is worse.
        allowed: the limit in terms of `worse`; None where it is on the value itself.
        num_pairs: pairs of starts that led to the outcome; 0 for single runs.
        pairs_to_settle: about how many more would settle an undecided one; None: no reasonable number.
    """

    base: float
    new: float
    change: float = 0.0
    worse: float
    low: float
    high: float
    allowed: float | None
    num_pairs: int = 0
    pairs_to_settle: int | None = None

    @property
    def half_width(self) -> float:
        """Half of the interval of the change: what stands behind ±."""
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "interval"}


def pairs_to_settle(
    distance: float, error: float, pairs: int, levels: tuple[float, float]
) -> int | None:
    """How many more pairs would settle a limit with a chance of 80 %, if the estimate is the truth; None if
    the estimate is too near the limit.

    Args:
        distance: of the estimate beyond the limit; negative is within.
        error: its standard error after `pairs` pairs.
        levels: of regression and pass.
    """
    if distance == 0 or not math.isfinite(error):
        return None
    level = levels[0] if distance > 0 else levels[1]
    reach = NormalDist().inv_cdf(1 - level) + NormalDist().inv_cdf(POWER)
    needed = pairs * (reach * error / distance) ** 2
    # The levels of the looks so far are spent, so at least another block of two pairs.
    more = max(2, math.ceil(needed - pairs))
    return more if more <= MOST_TIMES_AS_MANY * pairs else None


def undecided_words(
    verdicts: Sequence[LimitVerdict], others: Sequence[str], *, by_starts: bool
) -> tuple[str, ...]:
    """Reasons of no verdict: the undecided limits, what would settle them, and the limits that are kept."""
    undecided = [one for one in verdicts if one.outcome is GateOutcome.NO_VERDICT]
    kept = [one.label for one in verdicts if one.outcome is GateOutcome.PASS]
    reasons = [one.reason for one in undecided] + list(others)
    noisy = [one for one in undecided if isinstance(one, MeasuredVerdict)]
    if noisy:
        reasons.append(settle_words(noisy, by_starts=by_starts))
    if kept and reasons:
        words = "keeps its limit" if len(kept) == 1 else "keep their limits"
        reasons.append(f"{names(kept)} {words}")
    return tuple(reasons)


def settle_words(undecided: Sequence[MeasuredVerdict], *, by_starts: bool) -> str:
    """The runs that would settle the undecided limits, as the end of a sentence."""
    if not by_starts:
        return "paired starts would settle it: llmopt compare --run base=… --run new=…"
    known = [one.pairs_to_settle for one in undecided if one.pairs_to_settle is not None]
    near = [one for one in undecided if one.pairs_to_settle is None]
    if any(one.num_pairs < MIN_PAIRS for one in near):
        return f"fewer than {MIN_PAIRS} pairs of starts do not say how many would settle it"
    if near:
        at_limit = names(one.label for one in near)
        return f"no reasonable number of starts would settle {at_limit}: the change is at the limit"
    return f"about {max(known)} more starts of each side would settle it"


def names(labels: Iterable[str]) -> str:
    """`A, B and C`."""
    *first, last = list(labels)
    return f"{', '.join(first)} and {last}" if first else last
