"""Confidence intervals and tests: bootstrap, Student's t, exact tests of counts, and the signed-rank test.

Wilcoxon's signed-rank test with its exact distribution needs no assumption on the sides: differences of pairs
are symmetric about the change between them, so its level is exact under tails of any weight, and an outlier
counts by its rank (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3.1 to 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 1000
POWER = 0.8
# With one run per side the run-to-run spread is unknown; this is typical of identical runs on a quiet
# machine, and keeps a single lucky run from proving a small change.
ASSUMED_RUN_CV = 0.05


def student_quantile(probability: float, df: float) -> float:
    """The t below which `probability` lies. `df` is floored; infinity is the normal distribution."""
    from scipy import special

    if math.isinf(df) or df > 300:
        return NormalDist().inv_cdf(probability)
    return float(special.stdtrit(max(int(df), 1), probability))


def central_interval(estimates: Any, *, method: Any = "linear") -> tuple[float, float]:
    """The middle 95 % of resampled estimates."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(estimates, [tail, 1 - tail], method=method)
    return float(low), float(high)


def bootstrap_interval(
    groups: Sequence[np.ndarray],
    statistic: Callable[..., Any],
    *,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile interval of `statistic` of the pooled values, resampling whole groups; None for one group.
    `statistic` takes an array and an `axis`, as numpy's do. A group holds the values of one request (one
    value, or all its gaps), so that correlated values are resampled together."""
    if len(groups) < 2:
        return None
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(groups), size=(RESAMPLES, len(groups)))
    if all(len(group) == 1 for group in groups):
        return central_interval(statistic(np.concatenate(groups)[draws], axis=-1))
    pooled = (np.concatenate([groups[i] for i in draw]) for draw in draws)
    estimates = [statistic(values, axis=-1) for values in pooled]
    return central_interval(estimates)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's t interval of the mean of repeated runs; None for a single one."""
    if len(values) < 2:
        return None
    reach = student_quantile((1 + CONFIDENCE) / 2, len(values) - 1)
    half = reach * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def order_interval(
    values: Sequence[float] | np.ndarray, percentile: float
) -> tuple[float | None, float | None]:
    """Interval of a percentile between two of the sorted values, without assuming a distribution. The number
    of values below the percentile is binomial, so ranks with half of the remaining probability on each side
    bound it (David and Nagaraja, Order Statistics, 7.1). A side on which no value is far enough out is None:
    unbounded, because there are too few values."""
    from scipy import special

    ordered, count, share = np.sort(np.asarray(values)), len(values), percentile / 100
    if not count or not 0 < share < 1:
        return None, None
    below = special.bdtr(np.arange(count + 1), count, share)
    tail = (1 - CONFIDENCE) / 2
    # below[k] is P(at most k values lie below the percentile).
    lower = int(np.searchsorted(below, tail, side="right"))  # values[lower - 1] is below it
    upper = int(np.searchsorted(below, 1 - tail, side="left")) + 1  # values[upper - 1] is above it
    low = float(ordered[lower - 1]) if lower >= 1 else None
    return low, float(ordered[upper - 1]) if upper <= count else None


def requests_for_percentile(percentile: float) -> int:
    """The fewest values with which `order_interval` bounds a percentile on both sides: 368 for p99."""
    share = max(percentile, 100 - percentile) / 100
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(share))


def smallest_visible_change(run_cv: float, num_runs: int) -> float:
    """The relative change that two sides of `num_runs` runs each would notice with a power of 80 %, in a
    one-sided test at 5 %: (t₀.₉₅ + t₀.₈) · CV · √(2/k), with 2k − 2 degrees of freedom. With one run the
    spread is assumed known, so normal quantiles are used."""
    df = 2 * num_runs - 2 if num_runs > 1 else math.inf
    reach = student_quantile(0.95, df) + student_quantile(POWER, df)
    return reach * run_cv * math.sqrt(2 / num_runs)


def run_cv(values: Sequence[float]) -> float:
    """Coefficient of variation over repeated runs (n − 1), or the assumed one for a single run."""
    if len(values) < 2:
        return ASSUMED_RUN_CV
    return float(np.std(values, ddof=1) / np.mean(values))


@dataclass(frozen=True, slots=True)
class Effect:
    """A relative difference between two sides, as a logarithm: log(new / base). `degrees` of freedom of its
    standard error are infinite if the error is assumed known."""

    log_ratio: float
    standard_error: float
    degrees: float

    def half_width(self, one_sided: float) -> float:
        """Distance on the log scale to a bound that holds with probability `one_sided`."""
        return student_quantile(one_sided, self.degrees) * self.standard_error

    def with_error(self, known: float) -> Effect:
        """The effect with an additional independent error of known size. The degrees of freedom follow Welch
        and Satterthwaite: the known part has infinitely many."""
        total = math.hypot(self.standard_error, known)
        if math.isinf(self.degrees) or self.standard_error == 0:
            return replace(self, standard_error=total, degrees=math.inf)
        degrees = self.degrees * (total / self.standard_error) ** 4
        return replace(self, standard_error=total, degrees=degrees)


def effect_of_runs(
    base: Sequence[float],
    new: Sequence[float],
    paired_error: float = 0.0,
    *,
    between: float = 0.0,
    assumed_cv: float = ASSUMED_RUN_CV,
    believed: int = 2,
) -> Effect:
    """The change between repeated runs of two sides, with the larger of two uncertainties.

    One is the spread between runs, pooled over both sides on the log scale; the assumed one replaces it if a
    side has fewer than `believed` runs and the measured one is not larger. The other is `paired_error`, the
    standard error of the change over requests.
    `between` is the variance between two starts of the same model, in units of that between the runs of one
    start; more runs of the same start do not reduce it."""
    logs_base, logs_new = np.log(base), np.log(new)
    estimate = float(logs_new.mean() - logs_base.mean())
    reach = math.sqrt(1 / len(base) + 1 / len(new) + 2 * between)
    candidates = [Effect(estimate, paired_error, math.inf)]
    if min(len(base), len(new)) < believed:
        candidates.append(Effect(estimate, assumed_cv * reach, math.inf))
    if (degrees := len(base) + len(new) - 2) > 0:
        squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in (logs_base, logs_new))
        candidates.append(Effect(estimate, math.sqrt(squares / degrees) * reach, degrees))
    return max(candidates, key=lambda effect: effect.half_width(CONFIDENCE))


def effect_of_pairs(base: Sequence[float], new: Sequence[float]) -> Effect:
    """The change between paired (interleaved) runs: each pair saw the same machine state, so the error is
    that of the differences. Needs two pairs."""
    differences = np.log(new) - np.log(base)
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return Effect(float(differences.mean()), error, len(differences) - 1)


def effect_of_level(values: Sequence[float], bound: float) -> Effect:
    """Distance of the mean of repeated runs from a fixed bound, as log(mean / bound)."""
    logs = np.log(values)
    estimate = float(logs.mean()) - math.log(bound)
    if len(values) == 1:
        return Effect(estimate, ASSUMED_RUN_CV, math.inf)
    return Effect(estimate, float(logs.std(ddof=1)) / math.sqrt(len(values)), len(values) - 1)


def binomial_tails(count: int, trials: int, share: float) -> tuple[float, float]:
    """(P(X >= count), P(X <= count)) of X successes in `trials` at `share`: Clopper and Pearson's test."""
    from scipy import special

    share = min(max(share, 0.0), 1.0)
    upper = special.bdtrc(count - 1, trials, share) if count else 1.0
    return float(upper), float(special.bdtr(count, trials, share))


def fisher_tails(
    base: tuple[int, int], new: tuple[int, int], odds_ratio: float = 1.0
) -> tuple[float, float]:
    """(P(X >= x), P(X <= x)) of the new side's count x, given the sum of both, if the odds are `odds_ratio`
    times the base's: Fisher's exact test with his noncentral hypergeometric distribution. Sides are (count,
    trials)."""
    (before, base_trials), (after, new_trials) = base, new
    total = before + after
    outcomes = np.arange(max(0, total - base_trials), min(total, new_trials) + 1)
    logs = log_choose(new_trials, outcomes) + log_choose(base_trials, total - outcomes)
    logs = logs + outcomes * math.log(odds_ratio)
    chances = np.exp(logs - logs.max())
    chances /= chances.sum()
    upper, lower = chances[outcomes >= after].sum(), chances[outcomes <= after].sum()
    return float(min(upper, 1.0)), float(min(lower, 1.0))


def rate_tails(before: int, after: int, ratio: float = 1.0) -> tuple[float, float]:
    """`fisher_tails` of rare events over equal times, where the new rate is `ratio` times the base's: given
    their sum the new count is binomial (Przyborowski and Wilenski, 1940)."""
    return binomial_tails(after, before + after, ratio / (1 + ratio))


def log_choose(trials: int, counts: np.ndarray) -> np.ndarray:
    from scipy import special

    chosen, others = special.gammaln(counts + 1), special.gammaln(trials - counts + 1)
    return special.gammaln(trials + 1) - chosen - others


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
    """One-sided p values that the differences' centre is above, and below, 0. Works on the last axis. Equal
    sizes share no ranks, as they have no probability; a difference of exactly 0 speaks against both sides."""
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
