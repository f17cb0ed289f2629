"""Goodput, SLO share and energy as limits of a gate: judged per pass, and refused where values do not compare."""

from __future__ import annotations

from typing import Any

from llmopt.bench.gate.compare import Comparison, compare, judge_starts
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.record.result import RunData

GOODPUT = [10.0, 10.1, 9.9, 10.05, 9.95]


def run_of(
    goodput: list[float],
    share: float = 0.99,
    joules: float | None = None,
    limits: dict[str, float] | None = None,
) -> RunData:
    runs: list[dict[str, Any]] = [
        {
            "request_goodput": value,
            "slo_share": share if value else 0.0,
            "joules_per_token": joules,
            "duration": 5.0,
            "completed": 50,
            "failed": 0,
            "other_load": 0.0,
        }
        for value in goodput
    ]
    identity: dict[str, Any] = dict.fromkeys(
        ("workload_sha256", "target", "device", "machine", "model", "quantization", "dtype"), "x"
    )
    identity |= {"load": {}, "engine": {}}
    ours: dict[str, Any] = {
        "run_id": str(id(runs)),
        "arms": None,
        "name": "run",
        "interrupted": False,
        "slowdown": 1.0,
        "identity": identity,
        "runs": runs,
        "quality": None,
        "memory": {},
        "preemptions": 0,
        "slo": {"limits_ms": {"ttft": 200.0} if limits is None else limits, "share": share},
        "energy": {"joules": None, "cpu_reason": "this system has no RAPL counters"},
    }
    return RunData({"failed": 0, "completed": 250, "total_output_tokens": 2500, "llmopt": ours})


def judged(gate: str, base: RunData, new: RunData) -> Comparison:
    return compare(base, new, limits=parse_gate(gate))


def test_goodput_and_energy_are_judged_like_any_rate() -> None:
    base = run_of(GOODPUT, joules=0.5)
    gate = "request_goodput>=-25% joules_per_token<=+25%"
    assert judged(gate, base, run_of(GOODPUT, joules=0.5)).outcome is GateOutcome.PASS
    halved = run_of([value / 2 for value in GOODPUT], joules=0.5)
    assert judged(gate, base, halved).outcome is GateOutcome.REGRESSION
    assert judged(gate, base, run_of(GOODPUT, joules=1.0)).outcome is GateOutcome.REGRESSION


def test_a_goodput_of_zero_is_the_worst_and_not_missing() -> None:
    base, none = run_of(GOODPUT), run_of([0.0] * 5)
    assert judged("request_goodput>=-5%", base, none).outcome is GateOutcome.REGRESSION
    assert judged("slo_share>=0.95", base, none).outcome is GateOutcome.REGRESSION


def test_the_share_is_a_limit_on_the_new_run() -> None:
    base = run_of(GOODPUT, share=0.5)
    assert judged("slo_share>=0.95", base, run_of(GOODPUT)).outcome is GateOutcome.PASS
    low = judged("slo_share>=0.95", base, run_of(GOODPUT, share=0.8))
    assert low.outcome is GateOutcome.REGRESSION and "0.8 share" in low.reasons[0]


def test_other_limits_or_no_counter_are_no_verdict() -> None:
    base, other = run_of(GOODPUT), run_of(GOODPUT, limits={"ttft": 500.0})
    verdict = judged("request_goodput>=-5%", base, other)
    assert verdict.outcome is GateOutcome.NO_VERDICT
    assert "base: ttft:200, new: ttft:500" in verdict.reasons[0]
    without = judged("slo_share>=0.95", run_of(GOODPUT, limits={}), run_of(GOODPUT, limits={}))
    assert without.outcome is GateOutcome.NO_VERDICT and "--goodput" in without.reasons[0]
    energy = judged("joules_per_token<=+5%", base, run_of(GOODPUT))
    assert energy.outcome is GateOutcome.NO_VERDICT and "no RAPL counters" in energy.reasons[0]


def test_paired_starts_are_held_to_the_same() -> None:
    def judged_starts(new: RunData) -> Comparison:
        limits = parse_gate("request_goodput>=-5%")
        return judge_starts([run_of(GOODPUT)] * 12, [new] * 12, limits=limits, max_pairs=12)

    assert judged_starts(run_of(GOODPUT)).outcome is GateOutcome.PASS
    assert judged_starts(run_of([0.0] * 5)).outcome is GateOutcome.REGRESSION
    other = judged_starts(run_of(GOODPUT, limits={"ttft": 500.0}))
    assert other.outcome is GateOutcome.NO_VERDICT and "the same --goodput" in other.reasons[0]
