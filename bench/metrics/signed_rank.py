"""Wilcoxon's signed-rank test with its exact distribution, and the Hodges–Lehmann estimate that belongs to
it.

Differences of pairs are symmetric about the change between their sides whatever the distribution of either
side, so the level of the test is exact under tails of any weight; an outlier counts by its rank. Hollander,
Wolfe and Chicken, Nonparametric Statistical Methods, 3.1 to 3.3.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=512)
def upper_tails(count: int) -> np.ndarray:
    """P(W >= w) of the sum W of positive ranks of `count` symmetric differences, for every possible w."""
    ways = np.zeros(count * (count + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, count + 1):
        shifted = np.zeros_like(ways)
        shifted[rank:] = ways[:-rank]
        ways = (ways + shifted) / 2
    return np.minimum(ways[::-1].cumsum()[::-1], 1.0)


def p_values(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One-sided p values that the differences' centre is above, and below, 0.

    Works on the last axis. Equal sizes share no ranks, as they have no probability; a difference of exactly
    0 speaks against both sides.
    """
    count = differences.shape[-1]
    ranks = np.abs(differences).argsort(-1).argsort(-1) + 1
    tails = upper_tails(count)
    above = (ranks * (differences > 0)).sum(-1)
    below = (ranks * (differences < 0)).sum(-1)
    return tails[above], tails[below]


def walsh_averages(differences: np.ndarray) -> np.ndarray:
    """The sorted means of all pairs of differences, each with itself too."""
    first, second = np.triu_indices(len(differences))
    return np.sort((differences[first] + differences[second]) / 2)


def hodges_lehmann(differences: np.ndarray) -> float:
    """The median of the Walsh averages: the estimate of the centre."""
    return float(np.median(walsh_averages(differences)))


def centre_interval(differences: np.ndarray, error: float) -> tuple[float, float]:
    """Bounds of the centre, each wrong with probability at most `error`; infinite with too few values."""
    averages = walsh_averages(differences)
    # The k-th smallest average is a lower bound with error P(W >= M - k + 1) = P(W <= k - 1).
    tails = upper_tails(len(differences))
    allowed = int((tails <= error).sum())
    if not allowed:
        return -np.inf, np.inf
    return float(averages[allowed - 1]), float(averages[-allowed])
