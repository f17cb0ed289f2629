"""Exact tests of counts: a share against a bound (binomial), and two shares or rates against each other
(Fisher)."""

from __future__ import annotations

import math

import numpy as np


def binomial_tails(count: int, trials: int, share: float) -> tuple[float, float]:
    """(P(X >= count), P(X <= count)) of X successes in `trials` at `share`: Clopper and Pearson's test."""
    if share <= 0 or share >= 1:
        certain = 0 if share <= 0 else trials
        return float(certain >= count), float(certain <= count)
    outcomes = np.arange(trials + 1)
    logs = _log_choose(trials, outcomes)
    logs = logs + outcomes * math.log(share) + (trials - outcomes) * math.log1p(-share)
    chances = np.exp(logs)
    return float(min(chances[count:].sum(), 1.0)), float(min(chances[: count + 1].sum(), 1.0))


def fisher_tails(
    base: tuple[int, int], new: tuple[int, int], odds_ratio: float = 1.0
) -> tuple[float, float]:
    """(P(X >= x), P(X <= x)) of the new side's count x, given the sum of both, if the odds are `odds_ratio`
    times the base's: Fisher's exact test with his noncentral hypergeometric distribution.

    Args:
        base, new: (count, trials) of each side.
    """
    (before, base_trials), (after, new_trials) = base, new
    total = before + after
    outcomes = np.arange(max(0, total - base_trials), min(total, new_trials) + 1)
    logs = _log_choose(new_trials, outcomes) + _log_choose(base_trials, total - outcomes)
    logs = logs + outcomes * math.log(odds_ratio)
    chances = np.exp(logs - logs.max())
    chances /= chances.sum()
    upper, lower = chances[outcomes >= after].sum(), chances[outcomes <= after].sum()
    return float(min(upper, 1.0)), float(min(lower, 1.0))


def rate_tails(before: int, after: int, ratio: float = 1.0) -> tuple[float, float]:
    """`fisher_tails` of rare events over equal times, where the new rate is `ratio` times the base's: given
    their sum the new count is binomial (Przyborowski and Wilenski, 1940)."""
    return binomial_tails(after, before + after, ratio / (1 + ratio))


def _log_choose(trials: int, counts: np.ndarray) -> np.ndarray:
    logs = np.array([math.lgamma(value + 1) for value in range(trials + 1)])
    return logs[trials] - logs[counts] - logs[trials - counts]
