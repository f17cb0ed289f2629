"""Change points: the energy distance by its definition, changes that must be seen, noise that must not."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from llmopt.bench.studies.history_series import change_points, most_distant_split

from ...support import change_point_rates as rates


def energy(left: np.ndarray, right: np.ndarray) -> float:
    """Q̂ of two samples as Matteson and James write it (equations 5 and 6, α = 1)."""

    def within(side: np.ndarray) -> float:
        pairs = [abs(a - b) for a, b in combinations(side, 2)]
        return sum(pairs) / max(len(pairs), 1)

    n, m = len(left), len(right)
    between = 2 / (n * m) * sum(abs(a - b) for a in left for b in right)
    return n * m / (n + m) * (between - within(left) - within(right))


@pytest.mark.parametrize("min_segment", [1, 2, 3])
def test_the_split_has_the_largest_energy_distance(min_segment: int) -> None:
    rng = np.random.default_rng(min_segment)
    for count in range(2 * min_segment, 14):
        values = rng.normal(size=count)
        by_split = {
            (tau, kappa): energy(values[:tau], values[tau:kappa])
            for tau in range(min_segment, count - min_segment + 1)
            for kappa in range(tau + min_segment, count + 1)
        }
        split = most_distant_split(values, min_segment)
        assert split is not None
        assert split.distance == pytest.approx(max(by_split.values()))
        assert by_split[split.tau, split.kappa] == pytest.approx(split.distance)
    assert most_distant_split(np.zeros(2 * min_segment - 1), min_segment) is None


def indices(values: np.ndarray, **options: float) -> list[int]:
    return [point.index for point in change_points(values, **options)]  # pyright: ignore


def test_six_losses_of_four_percent_are_seen() -> None:
    noise = np.random.default_rng(0).normal(0, 0.008, 84)
    values = 2.0 * 1.04 ** np.repeat(np.arange(7), 12) * np.exp(noise)
    points = change_points(values)
    assert [abs(point.index - 12 * (i + 1)) <= 1 for i, point in enumerate(points)] == [True] * 6
    assert all(0.02 < point.change < 0.06 and point.pvalue < 0.001 for point in points)


def test_a_loss_that_is_recovered_is_seen() -> None:
    noise = np.random.default_rng(1).normal(0, 0.01, 40)
    values = np.exp(np.repeat([0.0, 0.06, 0.0], [15, 10, 15]) + noise)
    assert np.abs(np.subtract(indices(values), [15, 25])).max() <= 1


def test_changes_are_relative_and_have_both_directions() -> None:
    values = np.exp(np.repeat([0.0, 0.1], 12) + np.random.default_rng(2).normal(0, 0.01, 24))
    (up,), (down,) = change_points(values), change_points(1 / values)
    assert up.index == down.index == 12 and up.change == pytest.approx(0.105, abs=0.02)
    assert up.log_ratio == pytest.approx(-down.log_ratio)
    assert indices(values * 1e9) == indices(values * 1e-9) == [12]


def test_values_without_noise_change_where_they_change() -> None:
    assert indices(np.repeat([5.0, 5.1], [6, 4])) == [6]
    assert indices(np.full(30, 5.0)) == []
    assert indices(np.array([5.0, 9.0])) == indices(np.array([])) == []


def test_an_outlier_is_no_change() -> None:
    values = np.exp(np.random.default_rng(3).normal(0, 0.01, 40))
    for where in (0, 20, 38, 39):
        spiked = values.copy()
        spiked[where] *= 2
        assert indices(spiked) == []


def test_a_change_of_a_long_series_is_seen_in_its_window() -> None:
    noise = np.random.default_rng(4).normal(0, 0.01, 400)
    values = np.exp(np.where(np.arange(400) >= 390, 0.05, 0.0) + noise)
    assert indices(values) == [390]


def test_error_rates_of_the_synthetic_series() -> None:
    rng = np.random.default_rng(0)
    noise = rates.Noise({"stand-in": rng.lognormal(0, 0.3, 100)}, rng)
    tallies = rates.of_synthetic(noise, rng, 60).values()
    assert sum(tally.series for tally in tallies) == 60
    assert sum(tally.changes - tally.near for tally in tallies) == 0
    assert sum(tally.extra for tally in tallies) <= 1
    alarms = sum(bool(rates.points_of(np.exp(noise.draw("normal", 60)))) for _ in range(500))
    assert alarms <= 1
    assert rates.false_alarms_of_checks(noise, "normal", 60) == 0
