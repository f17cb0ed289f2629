"""The gate: how limits are read, what they decide, and the files that build servers read."""

from __future__ import annotations

import json
import math
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.compare import Comparison, RunData, compare
from llmopt.bench.gate.limits import COUNTED, MEASURED, RATES, GateOutcome, parse_gate, speed_limits
from llmopt.bench.gate.measured import background_error
from llmopt.bench.gate.outputs import benchmark_entries, junit
from llmopt.bench.page.page import markdown_table
from llmopt.bench.report.comparison import deltas_table


def run_of(
    ttft: list[float],
    *,
    pair_id: str | None = None,
    load: float | None = 0.0,
    name: str = "run",
    weights: int = 1000,
    kl: float | None = None,
) -> RunData:
    """A run with these TTFTs, one per pass; everything else is constant."""
    runs: list[dict[str, Any]] = [
        {
            "output_throughput": 20000 / value,
            "median_ttft_ms": value,
            "p99_ttft_ms": value * 2,
            "median_tpot_ms": value / 4,
            "median_e2el_ms": value * 10,
            "other_load": load,
        }
        for value in ttft
    ]
    quality = {
        "perplexity": 4.0,
        "kl_nats": kl,
        "top1_agreement": None if kl is None else 0.97,
        "reference": None if kl is None else "original",
        "token_sha256": "same",
    }
    memory = {
        "weight_bytes": weights,
        "checkpoint_bytes": weights,
        "kv_cache_bytes": 10,
        "peak_resident_bytes": None,
    }
    identity: dict[str, Any] = dict.fromkeys(
        ("workload_sha256", "target", "device", "machine"), "x"
    )
    identity |= {"load": {}, "engine": {}, "model": "m", "quantization": None, "dtype": "float32"}
    ours: dict[str, Any] = {
        "run_id": f"{name} {ttft} {load}",
        "arms": pair_id,
        "name": name,
        "interrupted": False,
        "slowdown": 1.0,
        "identity": identity,
        "runs": runs,
        "quality": quality,
        "memory": memory,
        "preemptions": 0,
    }
    result = {"failed": 0, "completed": 100, "total_output_tokens": 1000, "llmopt": ours}
    return RunData(result)


STEADY = [20.0, 20.1, 19.9, 20.05, 19.95]


def outcome(gate: str, base: RunData, new: RunData) -> GateOutcome:
    return compare(base, new, limits=parse_gate(gate)).outcome


def test_a_gate_is_read_as_written() -> None:
    found = parse_gate("p99_ttft_ms<=+10% output_throughput>=-5%, kl<=0.02  weight_bytes <= +0%")
    read = [(one.quantity.key, one.at_most, one.bound, one.relative) for one in found]
    assert read == [
        ("p99_ttft_ms", True, pytest.approx(0.10), True),
        ("output_throughput", False, pytest.approx(-0.05), True),
        ("kl", True, 0.02, False),
        ("weight_bytes", True, 0.0, True),
    ]
    assert [one.text for one in found] == ["≤ +10 %", "≥ -5 %", "≤ 0.02", "≤ +0 %"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no limit given"),
        ("p99_tft_ms<=+10%", "did you mean p99_ttft_ms"),
        ("weights_bytes<=5", "weight_bytes"),
        ("zzzz<=5", "nothing is called 'zzzz'"),
        ("kl=0.02", "cannot read 'kl=0.02'"),
        ("kl<=0.02x", "cannot read"),
        ("kl<=0.0.2", "no number"),
        ("kl<=1e999", "no finite number"),
        ("kl<=0.02 kl<=0.03", "kl has the same kind of limit twice"),
        ("median_ttft_ms<=-5", "write -5% for a change"),
        ("output_throughput>=-100%", "leaves nothing"),
    ],
)
def test_what_is_no_gate_says_why(text: str, words: str) -> None:
    with pytest.raises(BadInput, match="gate: ") as caught:
        parse_gate(text)
    assert words in str(caught.value)


def test_the_default_limits_are_one_slowdown() -> None:
    limits = speed_limits(0.05)
    sides = [math.log1p(one.bound) * (1 if one.at_most else -1) for one in limits]
    assert sides == pytest.approx([math.log1p(0.05)] * 4)


def test_relative_limits_need_effect_and_support() -> None:
    base = run_of(STEADY)
    assert outcome("median_ttft_ms<=+10%", base, run_of([v * 1.3 for v in STEADY])) == "regression"
    assert outcome("median_ttft_ms<=+10%", base, run_of([v * 1.02 for v in STEADY])) == "pass"
    # The same mean effect of 30 %, but from passes too noisy to support it.
    wild = [26.0 * factor for factor in (0.2, 4.0, 0.5, 2.5, 1.0)]
    assert outcome("median_ttft_ms<=+10%", base, run_of(wild)) == "no verdict"
    # An improvement that is demanded and does not come is a regression.
    assert outcome("median_ttft_ms<=-10%", base, run_of(STEADY)) == "regression"
    assert outcome("median_ttft_ms<=-10%", base, run_of([v * 0.7 for v in STEADY])) == "pass"
    assert (
        outcome("output_throughput>=-5%", base, run_of([v * 1.3 for v in STEADY])) == "regression"
    )
    assert outcome("output_throughput>=-5%", base, run_of([v * 0.9 for v in STEADY])) == "pass"


def test_absolute_limits_are_about_the_new_run_alone() -> None:
    base = run_of([1.0, 1.0])
    assert outcome("median_ttft_ms<=22", base, run_of(STEADY)) == "pass"
    assert outcome("median_ttft_ms<=18", base, run_of(STEADY)) == "regression"
    assert outcome("median_ttft_ms<=20.01", base, run_of(STEADY)) == "no verdict"
    assert outcome("output_throughput>=500", base, run_of(STEADY)) == "pass"


def test_bytes_and_divergence_need_no_statistics() -> None:
    base, new = run_of([20.0]), run_of([20.0], weights=1001, kl=0.03, name="new")
    assert outcome("weight_bytes<=+0%", base, new) == "regression"
    assert outcome("weight_bytes<=+0.1%", base, new) == "pass"
    assert outcome("weight_bytes<=1001", base, new) == "pass"
    assert outcome("kl<=0.02", base, new) == "regression"
    assert outcome("kl<=0.03 top1>=0.97 failed<=0 mean_output_len>=-10%", base, new) == "pass"
    assert outcome("kl<=+5%", base, new) == "no verdict"  # the base has none
    assert outcome("kl<=0.02", base, base) == "no verdict"
    # Too noisy a speed does not hide a checkpoint that grew.
    assert outcome("weight_bytes<=+0% median_ttft_ms<=+1%", base, new) == "regression"


def test_a_limit_on_what_was_not_measured_is_no_verdict() -> None:
    found = compare(run_of(STEADY), run_of(STEADY), limits=parse_gate("p95_tpot_ms<=+5%"))
    assert found.outcome is GateOutcome.NO_VERDICT and "no value in both runs" in found.reasons[0]


def test_background_load_widens_the_error_and_excuses_nothing() -> None:
    quiet, busy = run_of(STEADY), run_of([v * 1.3 for v in STEADY], load=0.3)
    assert background_error(quiet) == 0 and background_error(busy) > 0
    found = compare(quiet, busy)
    assert found.outcome is GateOutcome.REGRESSION
    assert "background load: 30% of the CPUs during the new run" in found.notes
    assert compare(quiet, run_of(STEADY, load=0.5, name="new")).outcome is GateOutcome.NO_VERDICT
    # Passes that say themselves whether they were disturbed need no wider error.
    for run in busy.result["llmopt"]["runs"]:
        run["disturbed"] = False
    assert background_error(busy) == 0


def test_a_disturbed_pass_is_left_out() -> None:
    new = run_of([*STEADY, 60.0], name="new")
    assert outcome("median_ttft_ms<=+10%", run_of(STEADY), new) == "no verdict"
    for run in new.result["llmopt"]["runs"]:
        run["disturbed"] = run["median_ttft_ms"] == 60.0
    assert outcome("median_ttft_ms<=+10%", run_of(STEADY), new) == "pass"


def test_paired_runs_met_the_same_interference() -> None:
    base = run_of([20.0, 40.0, 25.0, 30.0, 21.0], pair_id="a", load=0.5)
    worse = run_of([v * 1.15 for v in (20.0, 40.0, 25.0, 30.0, 21.0)], pair_id="a", load=0.5)
    assert compare(base, worse).outcome is GateOutcome.REGRESSION
    level = run_of([20.1, 39.9, 25.0, 30.1, 20.9], pair_id="a", load=0.5, name="other")
    assert compare(base, level).outcome is GateOutcome.PASS


@pytest.fixture(scope="module")
def judged() -> tuple[RunData, Comparison]:
    base = run_of(STEADY, name="before")
    new = run_of([v * 1.3 for v in STEADY], name='a<&\x01"b', kl=0.01)
    gate = "median_ttft_ms<=+10% kl<=0.02 median_e2el_ms<=+200% p95_tpot_ms<=+5%"
    return new, compare(base, new, limits=parse_gate(gate))


def test_junit_says_the_same_to_a_parser(judged: tuple[RunData, Comparison]) -> None:
    _, comparison = judged
    (suite,) = ElementTree.fromstring(junit(comparison).encode())
    assert suite.attrib["tests"] == "4" and suite.attrib["failures"] == "2"
    assert suite.attrib["errors"] == "0" and 'a<&"b' in suite.attrib["name"]
    cases = {case.attrib["name"]: [child.tag for child in case] for case in suite}
    assert cases == {
        "Median TTFT ≤ +10 %": ["failure"],
        "Median end to end ≤ +200 %": ["system-out"],
        "KL from the reference ≤ 0.02": ["system-out"],
        "verdict": ["failure"],
    }
    noisy = compare(run_of([20.0, 60.0]), run_of([21.0, 50.0], name="n"))
    (suite,) = ElementTree.fromstring(junit(noisy).encode())
    assert int(suite.attrib["errors"]) >= 1 and suite.attrib["failures"] == "0"


def test_dashboard_entries_have_the_documented_form(judged: tuple[RunData, Comparison]) -> None:
    entries = json.loads(json.dumps(benchmark_entries(*judged), allow_nan=False))
    assert set(entries) == {"smaller", "bigger"}
    for entry in [*entries["smaller"], *entries["bigger"]]:
        assert set(entry) <= {"name", "unit", "value", "range", "extra"}
        assert isinstance(entry["value"], float | int) and isinstance(entry["unit"], str)
    bigger = {entry["name"]: entry["value"] for entry in entries["bigger"]}
    mean = np.mean([20000 / (v * 1.3) for v in STEADY])
    assert next(iter(bigger.values())) == pytest.approx(mean)
    assert any(name.endswith("KL from the reference") for name in
               (entry["name"] for entry in entries["smaller"]))  # fmt: skip


def test_markdown_has_a_row_for_every_limit(judged: tuple[RunData, Comparison]) -> None:
    _, comparison = judged
    table = deltas_table(comparison.deltas, checks=comparison.checks)
    lines = markdown_table(table.header, table.rows)
    assert len(lines) == 2 + 3 and all(line.count("|") == 8 for line in lines)


def test_names_are_in_one_place() -> None:
    assert not set(MEASURED) & set(COUNTED)
    assert len(MEASURED) == len(RATES) + 4 * 7
