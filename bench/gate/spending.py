"""Group-sequential levels by alpha spending: how small a p value must be at each of several looks.

Lan and DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70 (1983), with the power
family of Kim and DeMets, Biometrika 74 (1987): by the fraction t of the planned pairs, alpha · t^exponent
may have been spent. Boundaries by the recursive integration of Armitage, McPherson and Rowe (1969).
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

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
