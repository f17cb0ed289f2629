"""--gate-speed: quality and memory decide on a busy machine, and speed where the machine can tell it."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.compare import Comparison, compare
from llmopt.bench.gate.gate_options import GateSpeed
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.gate.outputs import junit
from llmopt.bench.gate.speed_gate import by_processor, speed_reach
from llmopt.bench.record.result import RunData
from llmopt.bench.studies.recipe_files import read_recipe

from .test_gate import STEADY, run_of

RECIPE = read_recipe("ci-regression", None, ())


def busy(seed: int, *, factor: float = 1.0, kl: float = 0.001, disturbed: bool = True) -> RunData:
    """A side of the recipe on a machine whose other programs take from nothing to most of the time."""
    rng = np.random.default_rng(seed)
    run = run_of(list(20 * factor * rng.lognormal(0, 0.4, 7)), pair_id="pair", kl=kl)
    for one_pass in run.result["llmopt"]["runs"]:
        one_pass |= {"disturbed": disturbed, "disturbed_because": "60% in the run queue"}
        work = factor * float(rng.lognormal(0, 0.002))
        one_pass |= {"cpu_seconds": 3 * work, "waiting_seconds": 0.1 * rng.lognormal(0, 0.4)}
    return run


def judged(base: RunData, new: RunData, gate_speed: GateSpeed | None) -> Comparison:
    return compare(base, new, limits=RECIPE.compare.options.limits, gate_speed=gate_speed)


def test_twenty_equal_pairs_on_a_busy_machine_pass_by_quality_and_memory() -> None:
    assert RECIPE.compare.gate_speed == "auto"
    pairs = [(busy(seed), busy(seed + 100)) for seed in range(20)]
    with_speed = [judged(*pair, None).outcome for pair in pairs]
    assert with_speed.count(GateOutcome.NO_VERDICT) > 15
    comparisons = [judged(*pair, "auto") for pair in pairs]
    assert {comparison.outcome.exit_code for comparison in comparisons} == {0}
    assert "informs and does not gate: Output throughput" in comparisons[0].sentence
    speed, quality, _ = comparisons[0].aspects
    assert (speed.verdict, quality.verdict) == ("no verdict", "pass")


@pytest.mark.parametrize(
    ("gate_speed", "of_speed", "of_quality"),
    [
        ("auto", "regression", "regression"),
        ("off", "pass", "regression"),
        ("only", "regression", "pass"),
    ],
)
def test_each_part_decides_its_own_exit_code(
    gate_speed: GateSpeed, of_speed: str, of_quality: str
) -> None:
    """A build that is twice as slow, and one of other quality, on a quiet machine."""
    base, same = (run_of(STEADY, pair_id="pair", kl=0.001, name=name) for name in ("base", "same"))
    slow = run_of([2 * value for value in STEADY], pair_id="pair", kl=0.001, name="slow")
    worse = run_of(STEADY, pair_id="pair", kl=0.5, name="worse")
    assert judged(base, same, gate_speed).outcome is GateOutcome.PASS
    assert judged(base, slow, gate_speed).outcome.value == of_speed
    assert judged(base, worse, gate_speed).outcome.value == of_quality


def test_what_no_other_limit_decides_stays_without_a_verdict() -> None:
    base, new = busy(1), busy(101)
    assert compare(base, new, gate_speed="auto").outcome is GateOutcome.NO_VERDICT
    with pytest.raises(BadInput, match="leaves no limit: give one on quality"):
        compare(base, new, gate_speed="off")
    new.result["llmopt"]["interrupted"] = True
    for gate_speed in ("auto", "off", "only"):
        assert judged(base, new, gate_speed).outcome is GateOutcome.NO_VERDICT


def test_junit_skips_what_does_not_gate() -> None:
    (suite,) = ElementTree.fromstring(junit(judged(busy(1), busy(101), "auto")).encode())
    assert suite.attrib["errors"] == suite.attrib["failures"] == "0"
    assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped")) > 0


def test_a_runner_of_github_is_judged_by_the_processors_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPU time tells a slower build where the clock cannot; a machine of one's own is judged by the clock."""
    base, new, slower = busy(1), busy(101), busy(101, factor=1.2)
    limits = by_processor(RECIPE.compare.options.limits, base, new)
    assert [limit.quantity.key for limit in limits][-2:] == ["cpu_seconds", "waiting_seconds"]
    assert limits[-2].bound == pytest.approx(0.05)
    base.result["llmopt"]["runs"][0]["instructions"] = 1e9
    assert by_processor(limits, base, new) == limits  # the other side has no count of them
    assert judged(base, slower, "auto").outcome is GateOutcome.PASS
    monkeypatch.setenv("RUNNER_ENVIRONMENT", "github-hosted")
    assert judged(base, new, "auto").outcome is GateOutcome.PASS
    slowed = judged(base, slower, "auto")
    assert slowed.outcome is GateOutcome.REGRESSION and "CPU time" in slowed.decided_by[0]


def test_the_reach_says_before_the_run_which_limits_are_told() -> None:
    limits = parse_gate("output_throughput>=-5% median_tpot_ms<=+5% perplexity<=+1%")
    quiet, noisy = run_of(STEADY), busy(3)
    throughput, tpot = speed_reach(limits, quiet, 7)
    assert throughput["passes"] <= 7 and tpot["smallest"] < 0.02
    assert "7 passes tell a change of" in tpot["words"] and "enough for the limit" in tpot["words"]
    assert tpot["is_told"] and tpot["words"].endswith("enough for the limit")
    disturbed = run_of(STEADY)
    for one_pass in disturbed.result["llmopt"]["runs"]:
        one_pass["disturbed"] = True
    (_, tpot) = speed_reach(limits, disturbed, 7)
    assert not tpot["is_told"] and "while other programs load" in tpot["words"]
    reach, _ = speed_reach(limits, noisy, 7)
    assert reach["smallest"] > 0.2 and not (reach["passes"] or 999) <= 7
    assert "240 would not tell the limit" in reach["words"] or "the limit needs" in reach["words"]
    assert speed_reach(limits, run_of([20.0]), 7) == []
