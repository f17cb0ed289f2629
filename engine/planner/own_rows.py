"""Correction and error band of a plan by rows of the machine that it is for.

A prediction's error is the deployment's, which all its loads share, and the load's own. Before anything is
measured, half of a band's variance counts for either. Rows then move the level, shrunk by one row of no
error, and their spread takes the place of the load's share, which counts as one row too. `python -m
tools.plan_error` prints what this does to the held-out deployments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist, fmean

PRIOR_ROWS = 1
"""Rows of no error that a level is shrunk by: what equal shares of the variance mean."""
_QUANTILE = NormalDist().inv_cdf(0.95)

Factors = tuple[float, float]
"""Lowest and highest factor on a prediction that held 90 % of the measurements."""


def level(logs: tuple[float, ...]) -> float:
    """Logarithm of the correction by logarithms of measured / predicted."""
    return sum(logs) / (PRIOR_ROWS + len(logs))


def narrowed(prior: Factors, logs: tuple[float, ...], applied: float) -> Factors:
    """Factors on a prediction that was corrected by `applied`, with rows of measured / predicted before that
    in logarithms. Without a row it is the prior."""
    low, high = map(log, prior)
    variance = ((high - low) / (2 * _QUANTILE)) ** 2
    centre = ((low + high) / 2 + sum(logs)) / (PRIOR_ROWS + len(logs)) - applied
    mean = fmean(logs) if logs else 0.0
    spread = sum((one - mean) ** 2 for one in logs)
    own = (variance / 2 + spread) / max(1, len(logs))
    half = _QUANTILE * sqrt(own * (1 + 1 / (PRIOR_ROWS + len(logs))))
    return exp(centre - half), exp(centre + half)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of one machine in logarithms of measured / predicted, of throughput of what the other two, once
    corrected, predict. They count for plans of that GPU and engine. `of_model`: they are of the planned
    model; else a row is another model."""

    gpu: str
    engine: str
    tpot: tuple[float, ...]
    ttft: tuple[float, ...]
    throughput: tuple[float, ...]
    of_model: bool

    @property
    def text(self) -> str:
        """Their number in words."""
        count = len(self.tpot)
        rows = "1 row" if count == 1 else f"{count} rows"
        return f"{rows} of this machine{'' if self.of_model else ', of other models'}"

    def band(self, measure: str, prior: Factors) -> Factors:
        """The prior band of a measure, narrowed."""
        logs = getattr(self, measure)
        return narrowed(prior, logs, 0.0 if measure == "throughput" else level(logs))
