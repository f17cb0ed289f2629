"""Operating curve: the chance of each verdict by the true change, at the noise of the pairs at hand.

The residuals of the pairs, with random signs as pairing makes them symmetric, are drawn again with
replacement and shifted by the true change; each draw goes through the same sequential test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .gate import Outcome
from .sequential import CODES, SequentialPlan, decide

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
) -> tuple[dict[Outcome, float], float]:
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
) -> list[tuple[float, dict[Outcome, float], float]]:
    """(true worsening, chances, mean pairs) at multiples of the limit, on the scale of the residuals.

    An improvement that is demanded, or a limit of 0, has no multiples: steps are then in standard deviations.
    """
    unit = allowed if allowed > 0 else float(np.std(residuals)) or 1.0
    origin = 0.0 if allowed > 0 else allowed - unit
    worsenings = [origin + step * unit for step in steps]
    return [(worse, *chances(residuals, worse - allowed, plan)) for worse in worsenings]
