"""The jitter of `make test-jitter`: its stalls and its drift by seed, and the seeds that failed."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from tools.jitter import __main__ as command
from tools.jitter import clock


def stalls(
    seed: int, name: str, monkeypatch: pytest.MonkeyPatch, num_reads: int = 2000
) -> list[float]:
    """Seconds of each stall in a test that reads a clock so often."""
    slept: list[float] = []
    monkeypatch.setattr(clock, "_sleep", slept.append)
    jitter = clock.Jitter()
    jitter.begin(seed, name)
    for _ in range(num_reads):
        jitter.stall("read")
    return slept


def test_the_seed_and_the_test_determine_the_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stalls(1, "test_a", monkeypatch)
    assert first == stalls(1, "test_a", monkeypatch)
    assert first != stalls(2, "test_a", monkeypatch) and first != stalls(1, "test_b", monkeypatch)
    assert all(0.005 <= seconds <= 0.5 for seconds in first)


def test_a_loop_of_many_reads_is_not_stalled_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (len(stalls(1, "a", monkeypatch, count)) for count in (2000, 200_000))
    assert 5 < few < many < 60


def test_no_test_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_sleep", pytest.fail)
    for _ in range(1000):
        clock.Jitter().stall("test")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_clock_drifts_forwards_by_up_to_three_times(seed: int) -> None:
    jitter = clock.Jitter()
    assert jitter.drifted(5_000_000_000) == 5
    jitter.drift(seed)
    readings = [jitter.drifted(1000 * 10**9 + 10_000_000 * number) for number in range(6000)]
    rates = [(after - before) / 0.01 for before, after in pairwise(readings)]
    assert 1 / 3 - 1e-4 <= min(rates) < 0.5 and 2.7 < max(rates) <= 3 + 1e-4
    other = clock.Jitter()
    other.drift(seed)
    assert other.drifted(10**12) == jitter.drifted(10**12), "processes compare times"


def test_the_seeds_that_failed_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[int, list[str]]] = []

    def run(seed: int, options: list[str]) -> int:
        ran.append((seed, options))
        return int(seed == 2)

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(sys, "argv", ["jitter", "--seeds", "1,2,3", "-m", "not whole"])
    assert command.main() == 1
    assert ran == [(seed, ["-m", "not whole"]) for seed in (1, 2, 3)]
    assert capsys.readouterr().out.endswith("make test-jitter SEED=2\n")
