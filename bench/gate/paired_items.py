"""Statistics of items scored twice: McNemar's test and Tango's interval for 0/1 scores, else a bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from ..tasks.items import Aggregation, aggregate

CONFIDENCE = 0.95
RESAMPLES = 2000
# Resamples whose indices are in memory at once.
_BATCH = 100

Interval = tuple[float, float]


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test: of the items whose score changed, half are gains.

    Args:
        lost, gained: items that only the base, and only the new run, has right.
    """
    changed = lost + gained
    tail = sum(math.comb(changed, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**changed)


def tango_interval(lost: int, gained: int, count: int) -> Interval:
    """Score interval of the difference of two paired proportions, (gained − lost) / count.

    Tango, Statistics in Medicine 17 (1998): holds its level for few changed items too; with none it is
    ± z² / (count + z²).
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    difference = (gained - lost) / count

    def distance(delta: float) -> float:
        """Standard errors from the difference to `delta`, under `delta`."""
        a = 2 * count
        b = -gained - lost + (2 * count - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        # The likeliest share of losses if the difference is delta.
        share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = count * (2 * share + delta * (1 - delta))
        gap = count * (difference - delta)
        if variance <= 0:
            return math.copysign(math.inf, gap) if gap else 0.0
        return gap / math.sqrt(variance)

    low = _root(lambda delta: distance(delta) <= z, -1.0, difference)
    high = _root(lambda delta: distance(delta) < -z, difference, 1.0)
    return low, high


def wilson_interval(right: int, count: int) -> Interval:
    """Score interval of a proportion (Wilson, 1927)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (right + z * z / 2) / (count + z * z)
    reach = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def bootstrap_interval(
    aggregation: Aggregation,
    weights: np.ndarray,
    new: np.ndarray,
    base: np.ndarray | None = None,
    seed: int = 0,
) -> Interval:
    """Percentile interval of a metric, or with a base of its relative change: items are resampled, the same
    for both sides.

    Args:
        weights, new, base: float64 [items].
    """
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(0, RESAMPLES, _BATCH):
        chosen = rng.integers(0, len(new), size=(_BATCH, len(new)))
        values = aggregate(aggregation, new[chosen], weights[chosen])
        if base is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = values / aggregate(aggregation, base[chosen], weights[chosen]) - 1
        draws.append(values)
    tail = (1 - CONFIDENCE) / 2
    drawn = np.nan_to_num(np.concatenate(draws), nan=0.0)
    low, high = np.quantile(drawn, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def _root(is_above: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that is false at `low` becomes true, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        if is_above(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2
