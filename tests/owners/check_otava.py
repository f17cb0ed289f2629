"""Change points beside Apache Otava's (the former Hunter), in an environment with apache-otava.

    PYTHONPATH=<folder with llmopt> <python with apache-otava> tests/owners/check_otava.py

The most distant split of a series is the same as Otava's to the digit, where both allow segments of one. On
series with one to three changes of five standard deviations both find the same change points within a run, or
this one finds more. On noise alone their numbers are printed. Exit code 1 where a limit is broken.
"""

from __future__ import annotations

import sys

import numpy as np
from llmopt.bench.studies.history_series import change_points, most_distant_split
from otava.analysis import compute_change_points  # pyright: ignore[reportMissingImports]
from otava.change_point_divisive.calculator import (  # pyright: ignore[reportMissingImports]
    PairDistanceCalculator,
)

SERIES, RUNS, NOISE, STEP = 500, 60, 0.008, 0.04


def otava(values: np.ndarray) -> list[int]:
    return [point.index for point in compute_change_points(values.tolist())[0]]


def ours(values: np.ndarray) -> list[int]:
    return [point.index for point in change_points(values)]


def num_unequal_splits(rng: np.random.Generator) -> int:
    unequal = 0
    for _ in range(SERIES):
        values = rng.normal(size=int(rng.integers(2, RUNS)))
        theirs = PairDistanceCalculator(values).get_candidate_change_point(slice(0, len(values)))
        split = most_distant_split(values, 1)
        assert split is not None
        equal = split.tau == theirs.index and np.isclose(split.distance, theirs.qhat)
        unequal += not equal
    return unequal


def near(truth: list[int], points: list[int]) -> int:
    return sum(any(abs(change - point) <= 1 for point in points) for change in truth)


def main() -> int:
    rng = np.random.default_rng(0)
    unequal = num_unequal_splits(rng)
    print(f"most distant split: {unequal} of {SERIES} differ from Otava's")
    counts = {"otava": 0, "ours": 0}
    changes = 0
    for _ in range(60):
        lengths = rng.integers(8, 21, size=int(rng.integers(2, 5)))
        levels = np.cumsum(rng.choice([-1.0, 1.0], size=len(lengths)))
        logs = np.repeat(levels, lengths) * STEP + rng.normal(0, NOISE, int(lengths.sum()))
        truth = np.cumsum(lengths)[:-1].tolist()
        changes += len(truth)
        counts["otava"] += near(truth, otava(np.exp(logs)))
        counts["ours"] += near(truth, ours(np.exp(logs)))
    print(f"{changes} changes within one run: Otava {counts['otava']}, llmopt {counts['ours']}")
    noise = [np.exp(rng.normal(0, NOISE, RUNS)) for _ in range(SERIES)]
    alarms = [sum(bool(find(values)) for values in noise) for find in (otava, ours)]
    print(f"{SERIES} series of noise with a change point: Otava {alarms[0]}, llmopt {alarms[1]}")
    return int(
        unequal > 0 or counts["ours"] < max(counts["otava"], 0.98 * changes) or alarms[1] > 1
    )


if __name__ == "__main__":
    sys.exit(main())
