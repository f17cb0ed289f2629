"""The sequential test of pairs: its errors under tails of any weight, and its power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from llmopt.bench.gate.limits import GateOutcome
from llmopt.bench.gate.verdict import (
    CODES,
    FALSE_PASS,
    FALSE_REGRESSION,
    SequentialPlan,
    chances,
    decide,
    nominal_levels,
    operating_points,
    planned_pairs,
)
from llmopt.bench.metrics.statistics import centre_interval, hodges_lehmann, p_values, upper_tails

TRIALS = 4000
NOISES = {
    "normal": lambda rng, shape: rng.normal(0, 0.05, shape),
    "Student 3": lambda rng, shape: 0.04 * rng.standard_t(3, shape),
    "Cauchy": lambda rng, shape: 0.02 * rng.standard_cauchy(shape),
    "two moods": lambda rng, shape: (
        rng.choice((-0.3, 0.0, 0.3), shape, p=(0.2, 0.6, 0.2)) + rng.normal(0, 0.02, shape)
    ),
}


def rates(noise: str, excess: float, plan: SequentialPlan) -> dict[GateOutcome, float]:
    draws = NOISES[noise](np.random.default_rng(3), (TRIALS, plan.max_pairs))
    codes, _ = decide(excess + draws, plan)
    return {outcome: float(np.mean(codes == code)) for code, outcome in enumerate(CODES)}


def slack(rate: float) -> float:
    """Three standard deviations of the simulation."""
    return 3 * math.sqrt(rate * (1 - rate) / TRIALS)


@pytest.mark.parametrize("noise", NOISES)
def test_at_the_limit_the_errors_are_those_stated(noise: str) -> None:
    found = rates(noise, 0.0, SequentialPlan(30, num_limits=2))
    assert found[GateOutcome.REGRESSION] <= FALSE_REGRESSION / 2 + slack(FALSE_REGRESSION / 2)
    # The joint distribution of the looks is taken as normal, which costs up to a fifth of the level.
    assert found[GateOutcome.PASS] <= 1.2 * FALSE_PASS + slack(FALSE_PASS)
    assert found[GateOutcome.PASS] >= 0.5 * FALSE_PASS


@pytest.mark.parametrize("noise", ["normal", "Student 3", "Cauchy"])
def test_equal_builds_pass_and_twice_the_limit_is_found(noise: str) -> None:
    limit, plan = math.log(1.10), SequentialPlan(30, num_limits=2)
    assert rates(noise, -limit, plan)[GateOutcome.PASS] >= 0.99
    assert rates(noise, math.log(1.2) - limit, plan)[GateOutcome.REGRESSION] >= 0.95


def test_an_early_end_keeps_the_error() -> None:
    plan = SequentialPlan(30, last=12)
    draws = np.random.default_rng(4).normal(0, 0.05, (TRIALS, 12))
    codes, pairs = decide(draws, plan)
    assert np.mean(codes == 1) <= FALSE_REGRESSION + slack(FALSE_REGRESSION)
    assert plan.looks == (6, 8, 10, 12) and pairs.max() == 12
    # Looks that come later change nothing at those before.
    assert plan.pass_levels[:3] == pytest.approx(SequentialPlan(30).pass_levels[:3])


def test_spending_all_at_one_look_is_a_fixed_test() -> None:
    assert nominal_levels((1.0,), 0.05, 1.0) == pytest.approx((0.05,), rel=1e-3)
    levels = nominal_levels((0.5, 1.0), 0.025, 3.0)
    # At half of the pairs an eighth of the error may be spent.
    assert levels[0] == pytest.approx(0.025 / 8, rel=1e-3) and 0.022 < levels[1] < 0.025


def test_the_signed_rank_distribution_is_exact() -> None:
    # Three differences: the sums 0 to 6 have 1, 1, 1, 2, 1, 1, 1 of eight sign patterns.
    assert upper_tails(3) * 8 == pytest.approx([8, 7, 6, 5, 3, 2, 1])
    above, below = p_values(np.array([1.0, 2.0, -3.0]))
    assert (above, below) == pytest.approx((5 / 8, 5 / 8))
    values = np.array([1.0, 2.0, 3.0, 4.0, 100.0])
    assert hodges_lehmann(values) == 3.0
    assert centre_interval(values, 1 / 32) == (1.0, 100.0)
    assert centre_interval(values[:4], 1 / 32) == (-np.inf, np.inf)


def test_the_operating_curve_rises_from_pass_to_regression() -> None:
    residuals = np.random.default_rng(5).normal(0, 0.04, 20)
    points = operating_points(residuals, math.log(1.1), SequentialPlan(24))
    passes = [point.passes for point in points]
    regressions = [point.regressions for point in points]
    assert passes[0] >= 0.99 and passes == sorted(passes, reverse=True)
    assert regressions[-1] >= 0.99 and regressions == sorted(regressions)
    found, _ = chances(residuals, 0.0, SequentialPlan(24))
    assert found[GateOutcome.REGRESSION] <= 0.02 and found[GateOutcome.PASS] <= 0.08


def test_more_noise_and_smaller_changes_need_more_pairs() -> None:
    """Take as many as the plan says: an equal build passes, and one worse by twice the limit is found."""
    pairs = planned_pairs(0.015, 0.03)
    assert (
        pairs is not None and planned_pairs(0.005, 0.03) == 8 and planned_pairs(0.3, 0.03) is None
    )
    assert pairs < (planned_pairs(0.015, 0.02) or 0)
    plan, noise = SequentialPlan(pairs), 0.015 * math.sqrt(2)
    draws = np.random.default_rng(5).normal(0, noise, (TRIALS, pairs))
    limit = math.log1p(0.03)
    equal, _ = decide(draws - limit, plan)
    twice, _ = decide(draws + math.log1p(0.06) - limit, plan)
    assert np.mean(equal == 2) > 0.77 and np.mean(twice == 1) > 0.77
