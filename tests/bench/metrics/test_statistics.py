"""Intervals, Student's t, and the error rates of the gate by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from llmopt.bench.gate.compare import compare
from llmopt.bench.gate.limits import GateOutcome
from llmopt.bench.gate.measured import paired_error
from llmopt.bench.metrics.statistics import (
    ASSUMED_RUN_CV,
    bootstrap_interval,
    effect_of_level,
    effect_of_pairs,
    effect_of_runs,
    mean_interval,
    order_interval,
    run_cv,
    smallest_visible_change,
    student_quantile,
)
from llmopt.bench.record.result import RunData


@pytest.mark.parametrize(
    ("df", "probability", "expected"),
    [
        (1, 0.975, 12.7062),
        (2, 0.95, 2.91999),
        (4, 0.99, 3.74695),
        (8, 0.8, 0.88889),
        (9, 0.995, 3.24984),
        (30, 0.975, 2.04227),
        (math.inf, 0.95, 1.64485),
    ],
)
def test_student_quantile_against_the_tables(
    df: float, probability: float, expected: float
) -> None:
    assert student_quantile(probability, df) == pytest.approx(expected, abs=1e-4)
    assert student_quantile(1 - probability, df) == pytest.approx(-expected, abs=1e-4)


def test_smallest_visible_change_of_the_literature() -> None:
    # About 4.0, 2.5, 1.7 and 1.2 coefficients of variation for 2, 3, 5 and 10 runs an arm.
    found = [smallest_visible_change(1.0, k) for k in (2, 3, 5, 10)]
    assert found == pytest.approx([4.0, 2.5, 1.7, 1.2], abs=0.05)


def test_bootstrap_interval_covers_the_mean() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        sample = rng.normal(10, 2, size=40)
        bounds = bootstrap_interval([sample[i : i + 1] for i in range(40)], np.mean, seed=trial)
        assert bounds is not None
        covered += bounds[0] <= 10 <= bounds[1]
    assert 0.88 <= covered / 200 <= 0.99


def test_bootstrap_keeps_groups_together() -> None:
    # Ten groups of a hundred equal values: the uncertainty is that of ten values, not of a thousand.
    values = np.arange(10.0)
    grouped = bootstrap_interval([np.full(100, v) for v in values], np.mean)
    alone = bootstrap_interval([np.array([v]) for v in values], np.mean)
    assert grouped is not None and alone is not None
    assert grouped == pytest.approx(alone, abs=0.5)
    assert bootstrap_interval([np.array([1.0])], np.mean) is None


def test_effect_of_runs_by_hand() -> None:
    effect = effect_of_runs([100, 100, 121], [110, 110, 110])
    # ln 1.1 - (2/3) ln 1.1 ... the mean of ln base is ln 100 + (2/3) ln 1.1.
    assert effect.log_ratio == pytest.approx(math.log(1.1) / 3)
    assert effect.degrees == 4
    a = math.log(1.21) * math.sqrt(2 / 3)  # sqrt of the sum of squares in the base arm
    assert effect.standard_error == pytest.approx(math.sqrt(a * a / 4) * math.sqrt(2 / 3))


def test_single_runs_get_the_assumed_spread() -> None:
    effect = effect_of_runs([100.0], [103.0])
    assert effect.standard_error == pytest.approx(ASSUMED_RUN_CV * math.sqrt(2))
    assert run_cv([5.0]) == ASSUMED_RUN_CV
    # Five quiet runs against a single one do not prove that the single one was quiet.
    assert effect_of_runs([100.0] * 5, [103.0]).standard_error > ASSUMED_RUN_CV


def test_effect_of_pairs_cancels_what_both_saw() -> None:
    drift = np.array([1.0, 3.0, 0.5, 2.0])
    effect = effect_of_pairs(list(100 * drift), list(110 * drift))
    assert effect.log_ratio == pytest.approx(math.log(1.10))
    assert effect.standard_error == pytest.approx(0.0, abs=1e-12)
    assert effect_of_runs(list(100 * drift), list(110 * drift)).standard_error > 0.3


def test_paired_error_cancels_the_prompts() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(3, 1, size=60)
    base = {str(i): [value] for i, value in enumerate(lengths)}
    scaled = {str(i): [value * 1.2] for i, value in enumerate(lengths)}
    assert paired_error(base, scaled) == pytest.approx(0.0, abs=1e-12)
    shuffled = {str(i): [value] for i, value in enumerate(rng.permutation(lengths))}
    assert paired_error(base, shuffled) > 0.05
    assert paired_error(base, {"other": [1.0]}) == 0.0


def simulated(rng: np.random.Generator, cv: float, num_runs: int, factor: float = 1.0) -> RunData:
    """A run whose passes share a state of the machine: one factor a pass, on all latencies."""
    runs = []
    for noise in rng.lognormal(0, cv, size=num_runs) * factor:
        jitter = rng.lognormal(0, cv / 3, size=3)
        runs.append(
            {
                "output_throughput": 1000 / noise,
                "median_ttft_ms": 20 * noise * jitter[0],
                "median_tpot_ms": 5 * noise * jitter[1],
                "median_e2el_ms": 400 * noise * jitter[2],
            }
        )
    identity = dict.fromkeys(("workload_sha256", "target", "device", "machine"), "same")
    ours: dict[str, Any] = {
        "run_id": str(rng.integers(1 << 62)),
        "arms": None,
        "name": "run",
        "interrupted": False,
        "slowdown": 1.0,
        "identity": {**identity, "load": {}, "engine": {}}
        | {"model": "m", "quantization": None, "dtype": "float32"},
        "runs": runs,
        "quality": None,
        "memory": {},
    }
    result = {"failed": 0, "completed": 100, "total_output_tokens": 1000, "llmopt": ours}
    return RunData(result)


def verdicts(cv: float, num_runs: int, factor: float, trials: int) -> dict[GateOutcome, float]:
    rng = np.random.default_rng(11)
    found = [
        compare(simulated(rng, cv, num_runs), simulated(rng, cv, num_runs, factor)).outcome
        for _ in range(trials)
    ]
    return {outcome: found.count(outcome) / trials for outcome in GateOutcome}


@pytest.mark.parametrize("cv", [0.01, 0.05, 0.15])
@pytest.mark.parametrize("num_runs", [2, 3, 5])
def test_false_alarms_stay_under_two_percent(cv: float, num_runs: int) -> None:
    trials = 400
    # Two standard deviations of the simulation above the nominal rate.
    slack = 2 * math.sqrt(0.02 * 0.98 / trials)
    assert verdicts(cv, num_runs, 1.0, trials)[GateOutcome.REGRESSION] <= 0.02 + slack


@pytest.mark.parametrize("cv", [0.01, 0.03, 0.10])
def test_a_real_slowdown_never_passes(cv: float) -> None:
    assert verdicts(cv, 5, 1.15, 200)[GateOutcome.PASS] <= 0.01


def test_power_on_a_quiet_machine() -> None:
    assert verdicts(0.01, 5, 1.2, 200)[GateOutcome.REGRESSION] >= 0.99
    assert verdicts(0.005, 5, 1.0, 200)[GateOutcome.PASS] >= 0.95
    assert verdicts(0.08, 5, 2.0, 200)[GateOutcome.REGRESSION] >= 0.95


def test_noise_gives_no_verdict_and_not_a_pass() -> None:
    assert verdicts(0.2, 3, 1.0, 200)[GateOutcome.NO_VERDICT] >= 0.6


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # The ranks that the literature gives for a p99, as shares of the sample.
    [(200, 0.97, None), (500, 0.98, 1.0), (1000, 0.983, 0.997), (10000, 0.988, 0.992)],
)
def test_order_statistic_interval_of_a_p99(count: int, low: float, high: float | None) -> None:
    found = order_interval(np.arange(1, count + 1) / count, 99)
    assert found[0] == pytest.approx(low, abs=0.0055)
    assert found[1] is None if high is None else found[1] == pytest.approx(high, abs=0.0025)


def test_order_statistic_interval_covers_without_a_distribution() -> None:
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(400):
        low, high = order_interval(rng.lognormal(0, 2, size=60), 50)
        assert low is not None and high is not None
        inside += low <= 1.0 <= high  # the median of that distribution
    assert 0.93 <= inside / 400 <= 0.995
    assert order_interval([1.0, 2.0], 50) == (None, None)
    assert order_interval([], 99) == (None, None)


def test_interval_of_the_mean_by_the_table() -> None:
    assert mean_interval([1.0]) is None
    low, high = mean_interval([9.0, 10.0, 11.0]) or (0.0, 0.0)
    assert high - 10 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)
    assert (low + high) / 2 == pytest.approx(10)


def test_a_known_error_adds_in_quadrature_with_more_freedom() -> None:
    effect = effect_of_runs([100, 101, 102], [100, 101, 102])
    # What two starts share does not shrink with the passes: 1/3 + 1/3 + 2.
    apart = effect_of_runs([100, 101, 102], [100, 101, 102], between=1.0)
    assert apart.standard_error == pytest.approx(effect.standard_error * 2)
    wider = effect.with_error(effect.standard_error)
    assert wider.standard_error == pytest.approx(effect.standard_error * math.sqrt(2))
    assert wider.degrees == pytest.approx(effect.degrees * 4)
    assert effect_of_runs([1.0], [1.0]).with_error(0.1).degrees == math.inf
    assert effect_of_level([10.0, 10.0], 5.0).log_ratio == pytest.approx(math.log(2))
