"""Sequential test of pairs against a limit: after every second pair, regression, pass, or go on.

Both are one-sided signed-rank tests of the same hypothesis, that the worsening is exactly the limit:
rejected upwards it is a regression, downwards a pass (non-inferiority within the limit). Each has its own
error, spent over the looks: Lan and DeMets, Biometrika 70 (1983), with the power family of Kim and DeMets,
Biometrika 74 (1987), by which alpha · t^exponent may have been spent at the fraction t of the planned pairs;
boundaries by the recursive integration of Armitage, McPherson and Rowe (1969). The verdict is a function of
the pairs in their order and of the plan, so it can be computed again from them.

The operating curve is the chance of each verdict by the true change, at the noise of the pairs at hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from ..metrics.statistics import p_values
from .limits import GateOutcome

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
    """The one-sided level of each look, such that looking at all of them errs with probability `alpha`.

    The statistic at the fractions is taken as a Brownian motion, as a mean of independent pairs is. Its other
    boundary is ignored, so the error holds however the sequence is stopped.

    Args:
        fractions: of the planned pairs, rising; the last look spends what is left.
        exponent: 1 spends evenly, 3 nearly as O'Brien and Fleming.
    """
    spent = [alpha * min(t, 1.0) ** exponent for t in fractions[:-1]] + [alpha]
    levels: list[float] = []
    grid, density = np.zeros(1), np.ones(1)
    before, already = 0.0, 0.0
    for t, total in zip(fractions, spent, strict=True):
        step = math.sqrt(t - before)
        bound = _bound(grid, density, step, total - already, FAR * math.sqrt(t))
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


def _bound(grid: np.ndarray, density: np.ndarray, step: float, spend: float, far: float) -> float:
    """The bound that a path, which has not crossed so far, crosses with probability `spend`, by bisection."""
    low, high = -far, far
    for _ in range(60):
        middle = (low + high) / 2
        crossing = float(density @ np.interp((middle - grid) / step, TABLE, TAILS))
        low, high = (middle, high) if crossing > spend else (low, middle)
    return high


# Probability that a gate reports a regression although no metric is worse by more than its limit, divided
# over the limits; and that a limit passes although the metric is worse by it.
FALSE_REGRESSION = 0.01
FALSE_PASS = 0.05
# Even spending: with pairs as costly as starts, an early end is worth more than the last percent of power.
EXPONENT = 1.0
FIRST_LOOK = 6
PAIRS_BETWEEN_LOOKS = 2
CODES = (GateOutcome.NO_VERDICT, GateOutcome.REGRESSION, GateOutcome.PASS)


@dataclass(frozen=True, slots=True)
class SequentialPlan:
    """The looks of a gate of `num_limits` measured limits at its pairs, and their levels.

    Attributes:
        max_pairs: how many there can be.
        last: pairs at the last look, which spends what is left of the errors: fewer than `max_pairs` if the
            budget ended before; None is `max_pairs`.
    """

    max_pairs: int
    num_limits: int = 1
    last: int | None = None

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs at which the test is made."""
        last = self.last or self.max_pairs
        return (*range(FIRST_LOOK, last, PAIRS_BETWEEN_LOOKS), last)

    def levels(self, error: float) -> tuple[float, ...]:
        """The one-sided level of each look, spending `error` over them."""
        fractions = tuple(look / self.max_pairs for look in self.looks)
        return nominal_levels(fractions, error, EXPONENT)

    @property
    def regression_levels(self) -> tuple[float, ...]:
        return self.levels(FALSE_REGRESSION / max(self.num_limits, 1))

    @property
    def pass_levels(self) -> tuple[float, ...]:
        return self.levels(FALSE_PASS)


def decide(excess: np.ndarray, plan: SequentialPlan) -> tuple[np.ndarray, np.ndarray]:
    """(codes, pairs): the outcome as an index into `CODES`, and after how many pairs it was reached.

    Args:
        excess: worsening minus limit of every pair in order, on the last axis; fewer than `plan.max_pairs`
            stop at the looks so far.
    """
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
    residuals: np.ndarray, shift: float, plan: SequentialPlan, *, seed: int = 0, draws: int = DRAWS
) -> tuple[dict[GateOutcome, float], float]:
    """({verdict: share of the draws}, mean number of pairs) for pairs that exceed the limit by `shift`."""
    rng = np.random.default_rng(seed)
    shape = (draws, plan.looks[-1])
    noise = rng.choice(residuals, shape) * rng.choice((-1.0, 1.0), shape)
    codes, pairs = decide(shift + noise, plan)
    return {name: float(np.mean(codes == code)) for code, name in enumerate(CODES)}, float(
        pairs.mean()
    )


def operating_points(
    residuals: np.ndarray,
    allowed: float,
    plan: SequentialPlan,
    steps: Sequence[float] = STEPS,
) -> list[tuple[float, dict[GateOutcome, float], float]]:
    """(true worsening, chances, mean pairs) at multiples of the limit, on the scale of the residuals.

    An improvement that is demanded, or a limit of 0, has no multiples: steps are then in standard deviations.
    """
    unit = allowed if allowed > 0 else float(np.std(residuals)) or 1.0
    origin = 0.0 if allowed > 0 else allowed - unit
    worsenings = [origin + step * unit for step in steps]
    return [(worse, *chances(residuals, worse - allowed, plan)) for worse in worsenings]
