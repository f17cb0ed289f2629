"""Verdict of a limit: the evidence, its excess over the limit, and the outcome; the sequential test.

A limit is broken if the evidence shows the new side beyond it, kept if it shows it within, and else
undecided. Excess is worsening minus the allowed worsening: positive is beyond the limit. Evidence is one of:

- an interval of the excess (passes of single runs, paired items and positions, exact values);
- the tails of a test at the limit (counts);
- the excess of each pair of starts, for the sequential test, which looks after every second pair.

Its two tests are one-sided signed-rank tests of the same hypothesis, that the worsening is exactly the limit:
rejected upwards it is a regression, downwards a pass (non-inferiority within the limit). Each has its own
error, spent over the looks: Lan and DeMets, Biometrika 70 (1983), with the power family of Kim and DeMets,
Biometrika 74 (1987), by which alpha · t^exponent may have been spent at the fraction t of the planned pairs;
boundaries by the recursive integration of Armitage, McPherson and Rowe (1969). The verdict is a function of
the pairs in their order and of the plan, so it can be computed again from them. The operating curve is the
chance of each verdict by the true change, at the noise of the pairs at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Self

import numpy as np

from ..metrics.statistics import POWER, p_values
from ..page.page import span
from .limits import GateOutcome, Limit

GRID = 401
FAR = 8.0
NORMAL = NormalDist()
# Upper tails of the normal distribution, to be interpolated.
TABLE = np.linspace(-2 * FAR, 2 * FAR, 32_001)
TAILS = np.array([0.5 * math.erfc(z / math.sqrt(2)) for z in TABLE])


@lru_cache(maxsize=256)
def nominal_levels(
    fractions: tuple[float, ...], alpha: float, exponent: float
) -> tuple[float, ...]:
    """The one-sided level of each look, such that looking at all of them errs with probability `alpha`. The
    last of the rising fractions of the planned pairs spends the rest of the error; exponent 1 spends evenly,
    3 nearly as O'Brien and Fleming. The statistic at the fractions is taken as a Brownian motion, as a mean
    of independent pairs is. Its other boundary is ignored, so the error holds however the sequence is
    stopped."""
    spent = [alpha * min(t, 1.0) ** exponent for t in fractions[:-1]] + [alpha]
    levels: list[float] = []
    grid, density = np.zeros(1), np.ones(1)
    before, already = 0.0, 0.0
    for t, total in zip(fractions, spent, strict=True):
        step = math.sqrt(t - before)
        # The bound that a path, which has not crossed so far, crosses with the error of this look.
        low, bound = -FAR * math.sqrt(t), FAR * math.sqrt(t)
        for _ in range(60):
            middle = (low + bound) / 2
            crossing = float(density @ np.interp((middle - grid) / step, TABLE, TAILS))
            low, bound = (middle, bound) if crossing > total - already else (low, middle)
        levels.append(NORMAL.cdf(-bound / math.sqrt(t)))
        points = np.linspace(-FAR * math.sqrt(t), bound, GRID)
        kernel = np.exp(-0.5 * ((points[:, None] - grid) / step) ** 2) / (
            step * math.sqrt(2 * math.pi)
        )
        weights = np.full(GRID, points[1] - points[0])
        weights[[0, -1]] /= 2
        grid, density = points, weights * (kernel @ density)
        before, already = t, total
    return tuple(levels)


# Probability that a gate reports a regression although no metric is worse by more than its limit, divided
# over the limits; and that a limit passes although the metric is worse by it.
FALSE_REGRESSION = 0.01
FALSE_PASS = 0.05
# With pairs as costly as starts, a pass ends early by even spending. A regression cannot: the signed ranks of
# six pairs have no p-value below 1/64, so error spent there is lost.
REGRESSION_EXPONENT, PASS_EXPONENT = 2.0, 1.0
FIRST_LOOK = 6
PAIRS_BETWEEN_LOOKS = 2
CODES = (GateOutcome.NO_VERDICT, GateOutcome.REGRESSION, GateOutcome.PASS)


@dataclass(frozen=True, slots=True)
class SequentialPlan:
    """The looks of a gate of `num_limits` measured limits at its pairs, and their levels. The look at `last`
    pairs spends the rest of the errors; it is before `max_pairs` if the budget ended earlier."""

    max_pairs: int
    num_limits: int = 1
    last: int | None = None

    @property
    def looks(self) -> tuple[int, ...]:
        last = self.last or self.max_pairs
        return (*range(FIRST_LOOK, last, PAIRS_BETWEEN_LOOKS), last)

    def levels(self, error: float, exponent: float) -> tuple[float, ...]:
        fractions = tuple(look / self.max_pairs for look in self.looks)
        return nominal_levels(fractions, error, exponent)

    @property
    def regression_levels(self) -> tuple[float, ...]:
        return self.levels(FALSE_REGRESSION / max(self.num_limits, 1), REGRESSION_EXPONENT)

    @property
    def pass_levels(self) -> tuple[float, ...]:
        return self.levels(FALSE_PASS, PASS_EXPONENT)


def decide(excess: np.ndarray, plan: SequentialPlan) -> tuple[np.ndarray, np.ndarray]:
    """(codes, pairs): the outcome as an index into `CODES`, and the number of pairs that reached it, by the
    excess of every pair in order, on the last axis. Fewer than `plan.max_pairs` stop at the looks so far."""
    count = excess.shape[-1]
    codes = np.zeros(excess.shape[:-1], int)
    pairs = np.full(excess.shape[:-1], count)
    levels = zip(plan.looks, plan.regression_levels, plan.pass_levels, strict=True)
    for look, regression, non_inferior in levels:
        if look > count:
            break
        above, below = p_values(excess[..., :look])
        is_open = codes == 0
        for code, hits in ((1, above <= regression), (2, below <= non_inferior)):
            codes = np.where(is_open & hits, code, codes)
        pairs = np.where(is_open & (codes > 0), look, pairs)
    return codes, pairs


DRAWS = 1000
STEPS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The chance of each verdict on one metric if it is truly worse by `worse`, as shares."""

    worse: float
    passes: float
    regressions: float
    undecided: float
    mean_pairs: float


@dataclass(frozen=True, slots=True)
class OperatingCurve:
    """The points of one metric under one limit, for a plan of `max_pairs` pairs."""

    key: str
    label: str
    limit: str
    max_pairs: int
    points: tuple[OperatingPoint, ...]


def chances(
    residuals: np.ndarray, shift: float, plan: SequentialPlan, *, draws: int = DRAWS
) -> tuple[dict[GateOutcome, float], float]:
    """({verdict: share of the draws}, mean number of pairs) for pairs that exceed the limit by `shift`."""
    rng = np.random.default_rng(0)
    shape = (draws, plan.looks[-1])
    noise = rng.choice(residuals, shape) * rng.choice((-1.0, 1.0), shape)
    codes, pairs = decide(shift + noise, plan)
    shares = {name: float(np.mean(codes == code)) for code, name in enumerate(CODES)}
    return shares, float(pairs.mean())


def operating_points(
    residuals: np.ndarray, allowed: float, plan: SequentialPlan
) -> list[OperatingPoint]:
    """The points at multiples of the limit, on the scale of the residuals. A demanded improvement, or a limit
    of 0, has no multiples: steps are then in standard deviations."""
    unit = allowed if allowed > 0 else float(np.std(residuals)) or 1.0
    origin = 0.0 if allowed > 0 else allowed - unit
    points = []
    for worse in (origin + step * unit for step in STEPS):
        shares, mean_pairs = chances(residuals, worse - allowed, plan)
        passes, regressions = shares[GateOutcome.PASS], shares[GateOutcome.REGRESSION]
        undecided = shares[GateOutcome.NO_VERDICT]
        points.append(OperatingPoint(worse, passes, regressions, undecided, mean_pairs))
    return points


Interval = tuple[float | None, float | None]
"""Bounds of a value; None is unbounded."""


def between(interval: Interval | None, format_value: Callable[[float], str]) -> str:
    """The interval in parentheses; an exact value has none."""
    if interval is None or interval[0] == interval[1]:
        return ""
    return f" ({span(interval, format_value)})"


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
    """Probabilities of a value as high, and as low, as the new side's, if it is exactly at the limit; high is
    worse."""

    as_high: float
    as_low: float

    @property
    def outcome(self) -> GateOutcome:
        if self.as_low <= FALSE_PASS:
            return GateOutcome.PASS
        is_broken = self.as_high <= FALSE_REGRESSION
        return GateOutcome.REGRESSION if is_broken else GateOutcome.NO_VERDICT


@dataclass(frozen=True, slots=True)
class PairedExcess:
    """The excess of each pair of starts, in order, and the plan of the sequential test."""

    excess: np.ndarray
    plan: SequentialPlan

    @property
    def decided(self) -> tuple[GateOutcome, int]:
        code, pairs = decide(self.excess, self.plan)
        return CODES[int(code)], int(pairs)

    @property
    def outcome(self) -> GateOutcome:
        return self.decided[0]


Evidence = Excess | Tails | PairedExcess


@dataclass(frozen=True, slots=True)
class LimitVerdict:
    """The outcome of one limit, with its evidence and its sentence; `limit` is in gate syntax. `interval` is
    the 95 % interval of a count or score, or of its change if the limit is relative; `change` is relative to
    the base."""

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
        return f"{self.label} {self.limit}"

    @classmethod
    def of(
        cls,
        limit: Limit,
        text: str,
        evidence: Evidence | None = None,
        undecided: str = "",
        **fields: Any,
    ) -> Self:
        """The verdict that the evidence gives on a limit; no evidence is no verdict. `text` is the value or
        its change as a clause, or the reason that there is no evidence; `undecided` ends it if the evidence
        does not tell."""
        outcome = GateOutcome.NO_VERDICT if evidence is None else evidence.outcome
        if outcome is GateOutcome.REGRESSION:
            text += f", beyond the limit {limit.text}"
        elif outcome is GateOutcome.NO_VERDICT:
            text += undecided
        what = limit.quantity
        names = {"key": what.key, "label": what.label, "unit": what.unit}
        return cls(**names, limit=limit.text, outcome=outcome, reason=text, **fields)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredVerdict(LimitVerdict):
    """The outcome of a limit on a measured metric, by `num_pairs` pairs of starts; 0 for single runs.

    Attributes:
        change: relative to the base; `low` and `high` bound it with 90 % confidence (95 % on each side).
        worse: change as a slowdown: positive is worse; `allowed` is its limit, None for one on the value.
        pairs_to_settle: about how many more would settle an undecided limit; None: no reasonable number.
        visible: smallest worsening that two single runs call a regression with a chance of 80 %.
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
    visible: float | None = None

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "interval"}


def pairs_to_settle(
    distance: float, error: float, pairs: int, levels: tuple[float, float]
) -> int | None:
    """The number of further pairs that would settle a limit with a chance of 80 %, if the estimate is the
    truth; None if the estimate is too near the limit. `distance` of the estimate is positive beyond the
    limit, and has a standard `error` after `pairs` pairs; `levels` are those of regression and pass."""
    if distance == 0 or not math.isfinite(error):
        return None
    level = levels[0] if distance > 0 else levels[1]
    reach = NORMAL.inv_cdf(1 - level) + NORMAL.inv_cdf(POWER)
    needed = pairs * (reach * error / distance) ** 2
    # The levels of the looks so far are spent, so at least another block of two pairs.
    more = max(2, math.ceil(needed - pairs))
    return more if more <= MOST_TIMES_AS_MANY * pairs else None


PLANNED_PAIRS = (6, 8, 10, 12, 16, 20, 30, 40, 60, 80, 120, 160, 240)


def planned_pairs(noise: float, share: float) -> int | None:
    """The fewest pairs of runs with which a limit of `share` passes an equal build, and calls one that is
    worse by twice the limit a regression, each with a chance of 80 %; None beyond 240. Simulated pairs with
    the coefficient of variation `noise` of a run are judged as real ones."""
    limit = math.log1p(share)
    residuals = np.array([NORMAL.inv_cdf((rank + 0.5) / 200) for rank in range(200)])
    residuals *= noise * math.sqrt(2)
    for pairs in PLANNED_PAIRS:
        plan = SequentialPlan(pairs)
        equal, _ = chances(residuals, -limit, plan, draws=400)
        twice, _ = chances(residuals, math.log1p(2 * share) - limit, plan, draws=400)
        if min(equal[GateOutcome.PASS], twice[GateOutcome.REGRESSION]) >= POWER:
            return pairs
    return None


def undecided_words(
    verdicts: Sequence[LimitVerdict], others: Sequence[str], *, by_starts: bool
) -> tuple[str, ...]:
    """Reasons of no verdict: the undecided limits, what would settle them, and the limits that are kept."""
    undecided = [verdict for verdict in verdicts if verdict.outcome is GateOutcome.NO_VERDICT]
    kept = [verdict.label for verdict in verdicts if verdict.outcome is GateOutcome.PASS]
    noisy = [verdict for verdict in undecided if isinstance(verdict, MeasuredVerdict)]
    reasons = [verdict.reason for verdict in undecided]
    if len(noisy) > 1:  # each with its interval is a row of the table
        reasons = [verdict.reason for verdict in undecided if verdict not in noisy]
        reasons.insert(0, f"{names(v.label for v in noisy)} are too noisy to tell their limits")
    reasons += others
    if noisy:
        reasons.append(settle_words(noisy, by_starts=by_starts))
    if kept and reasons:
        phrase = "keeps its limit" if len(kept) == 1 else "keep their limits"
        reasons.append(f"{names(kept)} {phrase}")
    return tuple(reasons)


def settle_words(undecided: Sequence[MeasuredVerdict], *, by_starts: bool) -> str:
    """The runs that would settle the undecided limits, as the end of a sentence."""
    known = [v.pairs_to_settle for v in undecided if v.pairs_to_settle is not None]
    near = [v for v in undecided if v.pairs_to_settle is None]
    if not by_starts:
        text = ""
        if sizes := sorted(v.visible for v in undecided if v.visible is not None):
            span = " to ".join(dict.fromkeys(f"{size:.0%}" for size in (sizes[0], sizes[-1])))
            text = f"the smallest worsening that these runs could show is {span}; "
        has_number = known and not near
        more = f"about {max(known)} more runs of each side" if has_number else "paired starts"
        return f"{text}{more} would settle it: llmopt compare --run base=… --run new=…"
    if any(v.num_pairs < MIN_PAIRS for v in near):
        return f"fewer than {MIN_PAIRS} pairs of starts do not say how many would settle it"
    if near:
        at_limit = names(v.label for v in near)
        return f"no reasonable number of starts would settle {at_limit}: the change is at the limit"
    return f"about {max(known)} more starts of each side would settle it"


def names(labels: Iterable[str]) -> str:
    """`A, B and C`."""
    *first, last = list(labels)
    return f"{', '.join(first)} and {last}" if first else last
