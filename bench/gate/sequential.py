"""Sequential test of pairs against a limit: after every second pair, regression, pass, or go on.

Both are one-sided signed-rank tests of the same hypothesis, that the worsening is exactly the limit:
rejected upwards it is a regression, downwards a pass (non-inferiority within the limit). Each has its own
error, spent over the looks. The verdict is a function of the pairs in their order and of the plan, so it
can be computed again from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..metrics.signed_rank import p_values
from .gate import Outcome
from .spending import nominal_levels

# Probability that a gate reports a regression although no metric is worse by more than its limit, divided
# over the limits; and that a limit passes although the metric is worse by it.
FALSE_REGRESSION = 0.01
FALSE_PASS = 0.05
# Even spending: with pairs as costly as starts, an early end is worth more than the last percent of power.
EXPONENT = 1.0
FIRST_LOOK = 6
PAIRS_BETWEEN_LOOKS = 2
CODES = (Outcome.NO_VERDICT, Outcome.REGRESSION, Outcome.PASS)


@dataclass(frozen=True, slots=True)
class SequentialPlan:
    """When a gate of `num_limits` measured limits looks at its pairs, and at which levels.

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
