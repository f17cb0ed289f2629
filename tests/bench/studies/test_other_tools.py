"""Paired runs of another tool's benchmark by its command line, one more pair until the verdict stands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.gate_options import LimitOptions
from llmopt.bench.gate.limits import GateOutcome
from llmopt.bench.report.comparison import summary
from llmopt.bench.studies.starts_plan import Budget, StartsPlan, parse_builds
from llmopt.bench.studies.starts_series import PairedSeries

TOOL = """
import json, pathlib, random, sys
path, factor = pathlib.Path(sys.argv[1]), float(sys.argv[2])
if factor < 0:
    sys.exit("no GPU")
seconds = 10 * factor * random.Random(str(path)).uniform(0.995, 1.005)
path.write_text(json.dumps({
    "model_id": "some/model", "elapsed_time": seconds, "num_requests": 100, "total_num_tokens": 5000,
    "requests_per_second": 100 / seconds, "tokens_per_second": 5000 / seconds,
}))
"""


def judged(folder: Path, factor: float, gate: str | None = None, starts: int = 24) -> PairedSeries:
    tool = folder / "tool.py"
    tool.write_text(TOOL)
    words = [
        f"{name}={sys.executable} -S {tool} {{output}} {at}"
        for name, at in (("base", 1), ("new", factor))
    ]
    limits = LimitOptions(gate=gate)
    plan = StartsPlan(*parse_builds(words), (), limits, Budget(starts, 10.0), interleave=False)
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    return PairedSeries(plan, runs).run()


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.0, GateOutcome.PASS), (1.3, GateOutcome.REGRESSION)]
)
def test_pairs_are_made_until_the_verdict_stands(
    tmp_path: Path, factor: float, outcome: GateOutcome
) -> None:
    finished = judged(tmp_path, factor)
    assert finished.comparison.outcome is outcome
    assert (
        6 <= finished.comparison.num_pairs <= 12
        and finished.stopped_because == "the verdict is settled"
    )
    # Of a throughput benchmark without latencies, both rates are limited.
    assert {one.key for one in finished.comparison.deltas} == {
        "request_throughput",
        "total_token_throughput",
    }
    page = summary(finished.comparison)
    assert "| Request throughput (requests/s) |" in page and "●" in page
    assert f"judged by {finished.comparison.num_pairs} pairs of runs" in page
    again = judged(tmp_path, factor)  # what is there is not run again
    assert again.comparison.num_pairs == finished.comparison.num_pairs


def test_the_budget_ends_what_no_pair_decides(tmp_path: Path) -> None:
    finished = judged(tmp_path, 1.05, "request_throughput>=-4.76%", starts=8)
    assert finished.comparison.outcome is GateOutcome.NO_VERDICT
    assert finished.stopped_because == "--max-starts 8"


def test_a_tool_that_writes_nothing_is_named_with_its_last_words(tmp_path: Path) -> None:
    finished = judged(tmp_path, -1.0)
    assert finished.comparison.outcome is GateOutcome.REGRESSION
    assert "the new build crashes" in finished.comparison.sentence
    assert "no GPU" in finished.comparison.sentence


def test_what_two_tools_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"a benchmark with \{output\} and the other is not"):
        parse_builds(["base=python -c {output}", "new=python"])
    builds = parse_builds(["base=python -c {output}", "new=python -c {output}"])
    with pytest.raises(BadInput, match="put yours into the command"):
        PairedSeries(StartsPlan(*builds, ("--num-prompts", "3")), tmp_path)
