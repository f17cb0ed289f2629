"""The verdict of paired starts: sequential, by start, in words."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from llmopt.bench.gate.compare import Comparison, RunData, judge_starts
from llmopt.bench.gate.counts import mean_lengths
from llmopt.bench.gate.limits import MEASURED, GateOutcome, parse_gate
from llmopt.bench.gate.measured import tail_of_start, value_of_start
from llmopt.bench.gate.outputs import junit
from llmopt.bench.page.page import markdown_table
from llmopt.bench.record.result import to_json
from llmopt.bench.report.comparison import operating_table
from llmopt.bench.report.figures import latency_samples, operating_curve_svg

from .test_gate import run_of

GATE = "median_ttft_ms<=+10%"


def start(seed: int, factor: float = 1.0, **fields: float) -> RunData:
    """A start of three passes: its own mood of 5 %, passes within 1 %, and these fields in every pass."""
    rng = np.random.default_rng(seed)
    mood = 20 * factor * np.exp(rng.normal(0, 0.05))
    run = run_of([float(mood * np.exp(rng.normal(0, 0.01))) for _ in range(3)], name=f"s{factor}")
    for one in run.result["llmopt"]["runs"]:
        one.update({"duration": one["median_ttft_ms"] / 100, **fields})
    return run


def starts(count: int, factor: float = 1.0, *, first: int = 0, **fields: float) -> list[RunData]:
    return [start(first + number, factor, **fields) for number in range(count)]


def judged(count: int, factor: float, gate: str = GATE, **options: Any) -> Comparison:
    options = {"max_pairs": 30, **options}
    new = starts(count, factor, first=1000)
    return judge_starts(starts(count), new, limits=parse_gate(gate), **options)


def test_equal_builds_settle_as_a_pass_before_all_pairs_are_made() -> None:
    found = judged(12, 1.0)
    assert found.outcome is GateOutcome.PASS and found.settled and found.num_pairs == 12
    (delta,) = found.deltas
    assert 6 <= delta.num_pairs <= 12 and delta.low < 0 < delta.high


def test_a_slowdown_settles_as_a_regression() -> None:
    found = judged(14, 1.3)
    assert found.outcome is GateOutcome.REGRESSION and found.settled
    assert "beyond the limit ≤ +10 %" in found.reasons[0]
    assert found.deltas[0].change == pytest.approx(0.3, abs=0.08)


def test_few_pairs_are_not_settled_and_say_how_many_more_would_do() -> None:
    found = judged(4, 1.0)
    assert found.outcome is GateOutcome.NO_VERDICT and not found.settled
    assert judged(4, 1.0, final=True).settled
    assert "fewer than 5 pairs of starts do not say" in "; ".join(
        judged(1, 1.3, final=True).reasons
    )
    found = judged(12, 1.12, f"{GATE} median_e2el_ms<=+100%", max_pairs=12)
    assert found.outcome is GateOutcome.NO_VERDICT and found.settled
    assert [delta.outcome.value for delta in found.deltas] == ["no verdict", "pass"]
    said = "; ".join(found.reasons)
    assert "12 pairs of starts do not tell the limit ≤ +10 %" in said
    assert "more starts of each side would settle it" in said
    assert "Median end to end keeps its limit" in said


def test_a_verdict_stays_when_more_pairs_follow() -> None:
    settled = next(n for n in range(6, 30) if judged(n, 1.3).outcome is GateOutcome.REGRESSION)
    assert judged(settled + 1, 1.3).deltas[0].num_pairs == settled
    assert judged(settled, 1.3, final=True).deltas[0].num_pairs == settled


def test_cpu_time_gates_waiting_time_too() -> None:
    def judge(waiting: float) -> Comparison:
        base = starts(12, cpu_seconds=0.1, waiting_seconds=0.001)
        new = starts(12, first=50, cpu_seconds=0.1, waiting_seconds=waiting)
        for side in (base, new):
            for number, one in enumerate(side):
                for run in one.result["llmopt"]["runs"]:
                    run["cpu_seconds"] *= 1 + number / 1000
                    run["waiting_seconds"] += number / 1e6
        return judge_starts(base, new, limits=parse_gate("cpu_seconds<=+5%"), max_pairs=12)

    assert judge(0.0011).outcome is GateOutcome.PASS
    found = judge(0.07)
    assert found.outcome is GateOutcome.REGRESSION
    assert "Waiting time of a pass" in found.reasons[0] and "of the wall time" in found.reasons[0]
    assert [delta.outcome.value for delta in found.deltas] == ["pass", "regression"]


def test_a_disturbed_pass_does_not_count() -> None:
    one = start(1)
    passes = one.result["llmopt"]["runs"]
    passes[0].update({"median_ttft_ms": 900.0, "disturbed": True})
    kept = np.median([run["median_ttft_ms"] for run in passes[1:]])
    assert value_of_start(one, "median_ttft_ms") == pytest.approx(kept)
    for run in passes:
        run["disturbed"] = True
    assert value_of_start(one, "median_ttft_ms") is not None


def test_passes_in_turns_are_compared_pass_by_pass() -> None:
    rng = np.random.default_rng(8)
    base, new = [], []
    for number in range(8):
        moods = 20 * np.exp(rng.normal(0, 0.3, 6))
        pair = f"pair {number}"
        base.append(run_of([float(v) for v in moods], pair_id=pair))
        new.append(run_of([float(v * 1.02) for v in moods], pair_id=pair, name="new"))
        # A cold pass is left out at the beginning of one side.
        new[-1].result["llmopt"]["runs"].pop(0)
    found = judge_starts(base, new, limits=parse_gate("median_ttft_ms<=+5%"), max_pairs=8)
    assert found.outcome is GateOutcome.PASS
    assert found.deltas[0].change == pytest.approx(0.02, abs=1e-6)


def test_a_metric_without_values_is_named() -> None:
    found = judged(6, 1.0, "instructions<=+5%")
    assert found.outcome is GateOutcome.NO_VERDICT
    assert "Instructions of a pass has a limit but no value in every start" in found.reasons


def test_other_work_is_not_judged() -> None:
    other = copy.deepcopy(starts(1))
    other[0].result["llmopt"]["identity"]["device"] = "another"
    found = judge_starts(starts(1), other, limits=parse_gate(GATE), max_pairs=4)
    assert found.outcome is GateOutcome.NO_VERDICT and "device: x and another" in found.reasons[0]


def test_failures_and_checks_count_over_all_starts() -> None:
    base, new = starts(8), starts(8, first=70)
    for one in new:
        one.result.update({"failed": 3, "completed": 97})
    found = judge_starts(base, new, limits=parse_gate(GATE), max_pairs=8)
    assert found.outcome is GateOutcome.REGRESSION
    assert "failed requests rose from 0 to 24 of 800" in found.reasons
    found = judge_starts(base, base, limits=parse_gate("weight_bytes<=+0%"), max_pairs=8)
    assert found.outcome is GateOutcome.PASS and found.checks[0].outcome is GateOutcome.PASS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"failed": 50, "completed": 50}, "600 requests failed in the base run"),
        ({"failed": 0, "completed": 0}, "the base run has 0 requests: too few to judge"),
        (
            {"client": {"certified": False, "reasons": ["late"]}},
            "the client disturbed the base run",
        ),
    ],
)
def test_starts_have_no_verdict_for_the_reasons_that_runs_have(
    change: dict[str, Any], said: str
) -> None:
    base, new = starts(12), starts(12, first=1000)
    for run in base + new:
        run.result.update(change)
        run.result["llmopt"].update(change)
    verdict = judge_starts(base, new, limits=parse_gate(GATE), max_pairs=12)
    assert verdict.outcome is GateOutcome.NO_VERDICT and said in verdict.sentence


def test_a_few_failures_or_late_clients_do_not_withhold_a_verdict() -> None:
    base, new = starts(12), starts(12, first=1000)
    for run in (base[0], new[0]):
        run.result.update({"failed": 5, "completed": 95})
        run.result["llmopt"]["client"] = {"certified": False, "reasons": ["late"]}
    verdict = judge_starts(base, new, limits=parse_gate(GATE), max_pairs=12)
    assert verdict.outcome is GateOutcome.PASS, verdict.sentence


def test_a_failed_request_has_no_part_in_a_tail_nor_a_length() -> None:
    """A stream that ended in a time-out has chunks, and thus times, in the table of requests."""
    table: dict[str, list[Any]] = {
        "request_id": [f"r{number}" for number in range(404)],
        "run": [0] * 404,
        "success": [True] * 400 + [False] * 4,
        "ttft_ms": [20.0] * 404,
        "e2el_ms": [100.0] * 400 + [60_000.0] * 4,
        "output_len": [50] * 400 + [3] * 4,
    }
    run = RunData(start(1).result, table)
    what = MEASURED["p99_e2el_ms"]
    assert tail_of_start(run, what) == latency_samples(run)["e2el"].max() == 100.0
    assert set(mean_lengths([run]).values()) == {50.0}
    assert "r403" not in run.by_request("ttft_ms")


def test_the_operating_curve_is_in_every_output() -> None:
    found = judged(12, 1.0)
    (curve,) = found.curves
    assert [point.worse for point in curve.points][3] == pytest.approx(0.10)
    assert curve.points[0].passes >= 0.95 and curve.points[-1].regressions >= 0.95
    table = operating_table(found.curves)
    assert len(markdown_table(table.header, table.rows)) == 2 + len(curve.points)
    assert "Operating curve" in operating_curve_svg(found.curves)
    assert len(json.loads(to_json(found.as_dict()))["curves"][0]["points"]) == len(curve.points)
    few = judged(3, 1.0)
    assert json.loads(to_json(few.as_dict()))["deltas"][0]["high"] is None
    assert few.curves == () and "verdict" in junit(few)
