"""The gate's error rates on recorded runs of the same model (docs/measured/cpu)."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmopt.bench.gate.judge import other_load
from llmopt.bench.gate.rates import RunData, error_rates, read_starts, slowed

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


@pytest.mark.parametrize("name", NAMES)
def test_false_alarms_stay_under_two_percent(
    recordings: dict[str, list[RunData]], name: str
) -> None:
    for found in error_rates(recordings[name], factor=1.0):
        assert found.regression <= 0.02, found


@pytest.mark.parametrize("passes", [3, 1])
def test_few_passes_raise_no_more_alarms(recordings: dict[str, list[RunData]], passes: int) -> None:
    for found in error_rates(recordings["identical-runs-quiet"], factor=1.0, passes=passes):
        assert found.regression <= 0.02, found


@pytest.mark.parametrize("name", NAMES)
def test_a_slowdown_never_passes(recordings: dict[str, list[RunData]], name: str) -> None:
    assert all(one.passed == 0 for one in error_rates(recordings[name], factor=1.15))


def test_a_larger_slowdown_shows_on_an_idle_machine(
    recordings: dict[str, list[RunData]],
) -> None:
    found = {one.kind: one for one in error_rates(recordings["identical-runs"], factor=1.3)}
    assert found["idle"].pairs > 100 and found["idle"].regression >= 0.95
