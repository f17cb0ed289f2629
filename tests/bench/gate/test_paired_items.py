"""McNemar's exact test, the intervals of proportions, and the paired bootstrap."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from llmopt.bench.quality.task_items import (
    bootstrap_interval,
    mcnemar_exact,
    tango_interval,
    wilson_interval,
)


def test_mcnemar_by_hand() -> None:
    # 12 changed items, 3 or fewer on one side: 2 · (1 + 12 + 66 + 220) / 4096.
    assert mcnemar_exact(9, 3) == mcnemar_exact(3, 9) == pytest.approx(2 * 299 / 4096)
    assert mcnemar_exact(0, 0) == mcnemar_exact(4, 4) == 1.0
    assert mcnemar_exact(20, 0) == pytest.approx(2 / 2**20)


def test_tango_interval() -> None:
    z2 = 1.959964**2
    low, high = tango_interval(0, 0, 100)
    assert (low, high) == pytest.approx((-z2 / (100 + z2), z2 / (100 + z2)), abs=1e-6)
    low, high = tango_interval(9, 3, 50)
    assert (low, high) == pytest.approx([-side for side in reversed(tango_interval(3, 9, 50))])
    assert low < -6 / 50 < high
    # It is the score test inverted: at its ends the statistic without a difference is z.
    for lost in range(2, 40):
        excludes = tango_interval(lost, 5, 200)[1] < 0
        assert excludes == ((lost - 5) / math.sqrt(lost + 5) > math.sqrt(z2))


def coverage(lost: float, gained: float, count: int) -> float:
    """The chance that the interval covers the difference, summed over all outcomes of some weight."""
    total = 0.0
    for losses, gains in itertools.product(range(60), range(40)):
        same = count - losses - gains
        chances = (losses, lost), (gains, gained), (same, 1 - lost - gained)
        log_weight = math.lgamma(count + 1)
        log_weight += sum(n * math.log(share) - math.lgamma(n + 1) for n, share in chances)
        if log_weight > -14:
            low, high = tango_interval(losses, gains, count)
            total += math.exp(log_weight) * (low <= gained - lost <= high)
    return total


@pytest.mark.parametrize("shares", [(0.02, 0.01), (0.1, 0.02), (0.05, 0.05)])
def test_tango_interval_covers_the_truth(shares: tuple[float, float]) -> None:
    assert 0.94 < coverage(*shares, 120) < 0.98


def test_wilson_interval_by_hand() -> None:
    assert wilson_interval(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-5)
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0)
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)


def test_bootstrap_is_paired() -> None:
    rng = np.random.default_rng(1)
    base, ones = rng.normal(10, 3, 300), np.ones(300)
    low, high = bootstrap_interval("mean", ones, base * 0.9, base)
    assert (low, high) == pytest.approx((-0.1, -0.1))  # every item alike: nothing to estimate
    shuffled = rng.permutation(base * 0.9)
    wide = bootstrap_interval("mean", ones, shuffled, base)
    assert wide[0] < -0.1 < wide[1] and wide[1] - wide[0] > 0.05
    # A perplexity: e^0.1 times as large where each log-likelihood loses 0.1 a word.
    words = rng.integers(5, 50, 300).astype(float)
    logprobs = -2.0 * words
    low, high = bootstrap_interval("perplexity", words, logprobs - 0.1 * words, logprobs)
    assert (low, high) == pytest.approx((math.expm1(0.1),) * 2)
