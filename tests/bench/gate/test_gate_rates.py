"""The gate's error rates on recorded runs of the same model (docs/measured/cpu)."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmopt.bench.gate.limits import parse_gate, with_waiting
from llmopt.bench.gate.measured import other_load

from ...support.gate_rates import (
    RunData,
    binomial_interval,
    error_rates,
    job_rates,
    read_pairs,
    read_starts,
    sleeping,
    slowed,
    spinning,
)

RECORDED = Path(__file__).parents[3] / "docs" / "measured" / "cpu"
NAMES = ("identical-runs", "identical-runs-quiet", "identical-runs-held-out")


@pytest.fixture(scope="module")
def recordings() -> dict[str, list[RunData]]:
    found = {name: read_starts(RECORDED / f"{name}.parquet") for name in NAMES}
    # Every second start of the longest is enough here; tools/gate_error_rates.py takes all.
    return found | {NAMES[2]: found[NAMES[2]][::2]}


def test_the_recordings_hold_idle_and_disturbed_starts(
    recordings: dict[str, list[RunData]],
) -> None:
    loads = [other_load(one) for one in recordings["identical-runs"]]
    assert len(loads) == 30 and min(loads) < 0.02 and max(loads) > 0.4
    assert max(map(other_load, recordings["identical-runs-held-out"])) < 0.05
    one = recordings["identical-runs"][0].result["llmopt"]["runs"]
    assert len(one) == 5 and all(run["median_ttft_ms"] > 0 for run in one)


def test_slowing_a_start_slows_everything(recordings: dict[str, list[RunData]]) -> None:
    start = recordings["identical-runs"][0]
    before, after = (x.result["llmopt"]["runs"][0] for x in (start, slowed(start, 1.5)))
    assert after["median_tpot_ms"] == pytest.approx(1.5 * before["median_tpot_ms"])
    assert after["output_throughput"] == pytest.approx(before["output_throughput"] / 1.5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", NAMES)
def test_single_starts_raise_few_false_regressions(
    recordings: dict[str, list[RunData]], name: str
) -> None:
    assert error_rates(recordings[name], factor=1.0).regression <= 0.01


@pytest.mark.whole
@pytest.mark.parametrize("passes", [3, 1])
def test_few_passes_raise_no_more(recordings: dict[str, list[RunData]], passes: int) -> None:
    found = error_rates(recordings["identical-runs-quiet"], factor=1.0, passes=passes)
    assert found.regression <= 0.01


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_slowdown_of_single_starts_seldom_passes(
    recordings: dict[str, list[RunData]], name: str
) -> None:
    assert error_rates(recordings[name], factor=1.15).passed <= 0.01


def test_a_large_slowdown_of_single_starts_is_found(
    recordings: dict[str, list[RunData]],
) -> None:
    assert error_rates(recordings["identical-runs-quiet"], factor=2.0).regression >= 0.95


def test_jobs_of_recorded_pairs_keep_their_errors() -> None:
    limits = parse_gate("duration<=+10%")
    for name in NAMES:
        pairs = read_pairs(RECORDED / f"{name}.parquet")
        same = job_rates(pairs, limits, spinning(1.0), seconds=480, jobs=300)
        twice = job_rates(pairs, limits, spinning(1.2), seconds=480, jobs=300)
        assert same.regression <= 3 and same.no_verdict <= 30, name
        assert twice.regression >= 0.9 * 300 and twice.passed == 0, name


def test_a_sleep_is_found_by_the_waiting_time_of_a_gate_on_cpu_time() -> None:
    limits = with_waiting(parse_gate("cpu_seconds<=+5%"))
    assert [limit.quantity.key for limit in limits] == ["cpu_seconds", "waiting_seconds"]
    pairs = read_pairs(RECORDED / "identical-starts.parquet")
    assert set(pairs.changes) == {"duration", "cpu_seconds", "waiting_seconds"}
    found = job_rates(pairs, limits, sleeping(1.3), seconds=480, jobs=300)
    assert found.regression >= 0.95 * 300
    alone = job_rates(pairs, limits[:1], sleeping(1.3), seconds=480, jobs=300)
    assert alone.regression <= 3


def test_the_interval_of_a_share() -> None:
    assert binomial_interval(0, 300) == pytest.approx((0.0, 1 - 0.025 ** (1 / 300)), abs=1e-6)
    low, high = binomial_interval(5, 10)
    assert (low, high) == pytest.approx((0.1871, 0.8129), abs=1e-3)
    assert binomial_interval(10, 10)[1] == 1.0
