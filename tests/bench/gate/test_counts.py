"""Counts of a gate: what varies is tested, what cannot vary is compared as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from llmopt.bench.gate.compare import RunData, compare
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.metrics.statistics import binomial_tails, fisher_tails, rate_tails

from .test_gate import STEADY, run_of


def with_result(run: RunData, **changes: Any) -> RunData:
    result = copy.deepcopy(run.result)
    ours = result["llmopt"]
    ours["run_id"] = repr(changes)
    ours.update({key: value for key, value in changes.items() if key in ours})
    result.update({key: value for key, value in changes.items() if key in result})
    return RunData(result, changes.get("requests"))


def outcome(gate: str, base: RunData, new: RunData) -> GateOutcome:
    return compare(base, new, limits=parse_gate(gate)).outcome


BASE = run_of(STEADY)


@pytest.mark.parametrize(
    ("gate", "failed", "verdict"),
    [
        ("error_rate<=0.01", 0, "pass"),
        ("error_rate<=0.01", 1, "no verdict"),
        ("error_rate<=0.01", 12, "regression"),
        ("failed<=0", 0, "pass"),
        ("failed<=2", 1, "no verdict"),  # one more than the base: too few to tell whether more fail
        ("error_rate<=+50%", 0, "pass"),
        ("error_rate<=+50%", 20, "regression"),
    ],
)
def test_failed_shares_are_tested_exactly(gate: str, failed: int, verdict: str) -> None:
    new = with_result(BASE, failed=failed, completed=100 - failed)
    assert outcome(gate, BASE, new) == verdict


def test_preemptions_are_rates_of_rare_events() -> None:
    base = with_result(BASE, preemptions=20)
    for count, verdict in ((20, "pass"), (24, "no verdict"), (60, "regression"), (0, "pass")):
        assert outcome("preemptions<=+10%", base, with_result(BASE, preemptions=count)) == verdict


def test_lengths_are_compared_request_by_request() -> None:
    def lengths(extra: list[int]) -> RunData:
        names = [f"r-{number}" for number in range(len(extra))]
        table: dict[str, list[Any]] = {
            "request_id": names,
            "output_len": [100 + more for more in extra],
        }
        return with_result(BASE, requests=table, total_output_tokens=10_000 + sum(extra))

    base = lengths([0] * 50)
    assert outcome("mean_output_len>=-5%", base, lengths([0] * 50)) == "pass"
    assert outcome("mean_output_len>=-5%", base, lengths([-1, 1] * 25)) == "pass"
    assert outcome("mean_output_len>=-5%", base, lengths([-80, 60] * 25)) == "no verdict"
    assert outcome("mean_output_len>=-5%", base, lengths([-30, -28] * 25)) == "regression"


def test_peak_memory_of_single_runs_is_not_exact() -> None:
    def peak(size: int) -> RunData:
        return with_result(
            BASE, memory={**BASE.result["llmopt"]["memory"], "peak_resident_bytes": size}
        )

    base = peak(100_000)
    assert outcome("peak_resident_bytes<=+1%", base, peak(100_000)) == "pass"
    assert outcome("peak_resident_bytes<=+1%", base, peak(100_900)) == "no verdict"
    assert outcome("peak_resident_bytes<=+5%", base, peak(100_900)) == "pass"
    assert outcome("peak_resident_bytes<=+1%", base, peak(110_000)) == "regression"


def test_a_p99_of_few_requests_has_no_verdict_and_says_how_many_would_do() -> None:
    found = compare(BASE, run_of(STEADY, name="new"), limits=parse_gate("p99_ttft_ms<=+10%"))
    assert found.outcome is GateOutcome.NO_VERDICT
    assert "P99 TTFT needs 368 requests a side: 268 more" in found.reasons
    many = [with_result(run, completed=400) for run in (BASE, run_of(STEADY, name="new"))]
    assert outcome("p99_ttft_ms<=+10%", *many) == "pass"


def test_exact_tails_by_hand() -> None:
    assert binomial_tails(2, 2, 0.5) == pytest.approx((0.25, 1.0))
    assert binomial_tails(0, 5, 0.0) == (1.0, 1.0) and binomial_tails(1, 5, 0.0) == (0.0, 1.0)
    # Of 2 failures among 2 + 2 requests both fall on one side with probability 1 / 6.
    assert fisher_tails((0, 2), (2, 2)) == pytest.approx((1 / 6, 1.0))
    # With the odds doubled the three tables weigh 1, 4 * 2 and 2 ** 2.
    assert fisher_tails((0, 2), (2, 2), 2.0)[0] == pytest.approx(4 / 13)
    assert rate_tails(0, 3) == pytest.approx((0.125, 1.0))
