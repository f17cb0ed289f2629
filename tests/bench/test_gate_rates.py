"""The gate's error rates on recorded runs of the same model (bench/results/cpu)."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmopt.bench.gate_judge import other_load
from llmopt.bench.gate_rates import RunData, error_rates, read_starts, slowed

RECORDED = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "identical-runs.parquet"


@pytest.fixture(scope="module")
def starts() -> list[RunData]:
    return read_starts(RECORDED)


def test_the_recording_holds_idle_and_disturbed_starts(starts: list[RunData]) -> None:
    loads = [other_load(one) for one in starts]
    assert len(starts) == 30 and min(loads) < 0.02 and max(loads) > 0.4
    one = starts[0].result["llmopt"]["runs"]
    assert len(one) == 5 and all(run["median_ttft_ms"] > 0 for run in one)


def test_slowing_a_start_slows_everything(starts: list[RunData]) -> None:
    before, after = (x.result["llmopt"]["runs"][0] for x in (starts[0], slowed(starts[0], 1.5)))
    assert after["median_tpot_ms"] == pytest.approx(1.5 * before["median_tpot_ms"])
    assert after["output_throughput"] == pytest.approx(before["output_throughput"] / 1.5)


@pytest.mark.parametrize("passes", [5, 2])
def test_false_alarms_stay_under_two_percent(starts: list[RunData], passes: int) -> None:
    for found in error_rates(starts, factor=1.0, passes=passes):
        assert found.regression <= 0.02, found


def test_a_slowdown_never_passes_and_shows_on_an_idle_machine(starts: list[RunData]) -> None:
    found = {one.kind: one for one in error_rates(starts, factor=1.15)}
    assert all(one.passed == 0 for one in found.values())
    assert found["idle"].pairs > 100 and found["idle"].regression >= 0.95
