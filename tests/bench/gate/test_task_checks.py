"""Limits on task scores: paired by item, kept, broken and undecided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.compare import compare
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.gate.score_checks import task_changes
from llmopt.bench.quality.task_items import TaskItems, items_of
from llmopt.bench.record.result import RunData
from llmopt.bench.report.comparison import task_rows

from ...support.gate_rates import as_run

REQUESTS = [
    {
        "start": 0, "pass": 0, "request_id": str(number), "ttft_ms": 5.0, "tpot_ms": 2.0,
        "e2el_ms": 20.0, "output_len": 8, "duration_s": 1.0, "other_load": 0.0,
    }
    for number in range(8)
]  # fmt: skip


def run(
    scores: np.ndarray, *, metric: str = "exact_match", responses: str = "a", **record: Any
) -> RunData:
    """A run whose task `sums` has a score per item."""
    data = as_run(0, REQUESTS)
    rows = [
        {
            "task": "sums", "metric": metric, "filter": "none", "value": float(scores.mean()),
            "version": 1.0, "num_fewshot": 5,
        }
    ]  # fmt: skip
    samples = [
        {
            "doc_id": number, "doc_hash": f"h{number}", "filter": "none", metric: float(score),
            "filtered_resps": [f"{responses}{number}"], "target": "x",
        }
        for number, score in enumerate(scores)
    ]  # fmt: skip
    items = items_of({"sums": samples}, rows)
    data.result["llmopt"]["run_id"] = responses
    data.result["llmopt"]["tasks"] = {
        "protocol": "p", "error": None, "metrics": rows, **record
    }  # fmt: skip
    return RunData(data.result, data.requests, items=items)


def outcome(limit: str, base: RunData, new: RunData) -> tuple[GateOutcome, str]:
    (check,) = compare(base, new, limits=parse_gate(limit)).checks
    return check.outcome, check.reason


def binary(right: int, count: int = 400) -> np.ndarray:
    return (np.arange(count) < right).astype(float)


def test_a_lost_share_of_the_items_is_a_regression() -> None:
    base = run(binary(300))
    worse, same, changed = (
        run(binary(270), responses="b"),
        run(binary(300)),
        run(binary(299), responses="c"),
    )
    found, said = outcome("task.sums.exact_match>=-3%", base, worse)
    assert found is GateOutcome.REGRESSION
    assert "30 lost and 0 gained" in said and "-10.00 %" in said and "McNemar p = 1.86e-09" in said
    found, said = outcome("task.sums.exact_match>=-1%", base, changed)
    assert found is GateOutcome.NO_VERDICT and "score more items" in said
    assert outcome("task.sums.exact_match>=-3%", base, changed)[0] is GateOutcome.PASS
    # Equal responses differ by nothing, however few items there are.
    assert outcome("task.sums.exact_match>=+0%", base, same)[0] is GateOutcome.PASS
    few = [run(binary(3, 5), responses=name) for name in ("a", "b")]
    assert outcome("task.sums.exact_match>=-3%", *few)[0] is GateOutcome.NO_VERDICT
    # The default limits judge speed, and the change of the tasks is shown.
    comparison = compare(base, worse)
    (row,) = task_rows(comparison)
    assert row[1:3] == ["0.7500", "0.6750"] and row[3].startswith("-10.00 % (")
    assert comparison.as_dict()["tasks"][0]["lost"] == 30


def test_pairing_sees_what_two_standard_errors_hide() -> None:
    base, new = run(binary(200)), run(binary(190), responses="b")
    assert outcome("task.sums.exact_match>=-1%", base, new)[0] is GateOutcome.REGRESSION
    rng = np.random.default_rng(0)
    shuffled = run(rng.permutation(binary(190)), responses="c")
    assert outcome("task.sums.exact_match>=-1%", base, shuffled)[0] is GateOutcome.NO_VERDICT


def test_scores_that_are_no_zero_or_one_are_resampled() -> None:
    rng = np.random.default_rng(2)
    scores = rng.uniform(0.2, 0.9, 200)
    base, new = run(scores, metric="f1"), run(scores - 0.05, metric="f1", responses="b")
    found, said = outcome("task.sums.f1>=-2%", base, new)
    assert found is GateOutcome.REGRESSION and "200 items, paired bootstrap" in said
    assert outcome("task.sums.f1>=-15%", base, new)[0] is GateOutcome.PASS
    assert outcome("task.sums.f1>=0.4", base, new)[0] is GateOutcome.PASS


def test_a_bound_on_the_score_itself_has_an_interval() -> None:
    new = run(binary(300))
    assert outcome("task.sums.exact_match>=0.7", new, new)[0] is GateOutcome.PASS
    assert outcome("task.sums.exact_match>=0.8", new, new)[0] is GateOutcome.REGRESSION
    found, said = outcome("task.sums.exact_match>=0.74", new, new)
    assert found is GateOutcome.NO_VERDICT and "0.705" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"protocol": "chat"}, "asked in different ways"),
        ({"error": "boom"}, "its tasks failed: boom"),
    ],
)
def test_runs_that_asked_differently_are_not_paired(change: dict[str, Any], said: str) -> None:
    base, new = run(binary(300)), run(binary(300), responses="b", **change)
    found, reason = outcome("task.sums.exact_match>=-3%", base, new)
    assert found is GateOutcome.NO_VERDICT and said in reason


def test_missing_items_and_keys_are_named() -> None:
    base, new = run(binary(300)), run(binary(300), responses="b")
    assert "there are task.sums.exact_match" in outcome("task.sums.acc>=-3%", base, new)[1]
    other = run(binary(300, 300), responses="c")
    assert "different items" in outcome("task.sums.exact_match>=-3%", base, other)[1]
    bare = RunData(new.result, new.requests)
    assert "tasks.parquet" in outcome("task.sums.exact_match>=-3%", base, bare)[1]
    assert task_changes(base, bare) == ()
    row = base.result["llmopt"]["tasks"]["metrics"][0]
    twice = [row, {**row, "filter": "strict-match"}]
    base.result["llmopt"]["tasks"]["metrics"] = twice
    said = outcome("task.sums.exact_match>=-3%", base, base)[1]
    assert "several filters, name one after the metric: none, strict-match" in said
    limit = parse_gate("task.sums.exact_match.strict-match>=-3%")[0]
    assert limit.quantity.key.endswith(".strict-match")
    with pytest.raises(BadInput, match=r"write task\.NAME\.METRIC"):
        parse_gate("task.sums>=-3%")


def test_items_are_written_and_read(tmp_path: Path) -> None:
    items = run(binary(3, 5)).items
    assert items is not None
    items.write(tmp_path)
    read = TaskItems.beside(tmp_path)
    assert read is not None and read.of("sums", "exact_match", "none") is not None
    assert read.columns == items.columns
    (tmp_path / "tasks.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="damaged"):
        TaskItems.beside(tmp_path)
    assert TaskItems.beside(tmp_path / "none" / "result.json") is None


def test_the_aggregation_is_the_one_that_reproduces_the_value() -> None:
    def row(value: float) -> dict[str, Any]:
        return {"task": "t", "metric": "m", "filter": "none", "value": value}

    def sample(value: Any) -> dict[str, Any]:
        return {
            "doc_id": 0, "doc_hash": "h", "filter": "none", "m": value, "filtered_resps": [1],
            "target": "",
        }  # fmt: skip

    pairs = [(-8.0, 4), (-2.0, 1)]
    for value, name in ((np.exp(2.0), "perplexity"), (2.0 / np.log(2), "bits"), (-2.0, "mean")):
        wanted = row(float(value))
        assert len(items_of({"t": [sample(pair) for pair in pairs]}, [wanted])) == 2
        assert wanted["aggregation"] == name
    odd = row(0.3)
    assert len(items_of({"t": [sample("text")]}, [odd])) == 0 and odd["aggregation"] is None


def test_answers_that_change_are_limited_whatever_the_accuracy() -> None:
    """30 of 400 answers change, none from right to wrong on balance."""

    def chosen(flipped: int, scores: np.ndarray) -> RunData:
        data = run(scores, metric="acc", responses=f"c{flipped}")
        assert data.items is not None
        said = [
            str([(-1.0, True), (-2.0 if number >= flipped else -0.5, False)])
            for number in range(len(scores))
        ]
        columns = {**data.items.columns, "response": said}
        return RunData(data.result, data.requests, items=TaskItems(columns))

    base, new = chosen(0, binary(300)), chosen(30, binary(300))
    found, said = outcome("task.sums.flips<=2%", base, new)
    assert found is GateOutcome.REGRESSION and "30 of 400 answers" in said and "7.50%" in said
    assert outcome("task.sums.flips<=15%", base, new)[0] is GateOutcome.PASS
    found, said = outcome("task.sums.flips<=0.08", base, new)
    assert found is GateOutcome.NO_VERDICT and "items would tell" in said
    assert outcome("task.sums.flips<=0%", base, base)[0] is GateOutcome.PASS
    assert "30 answers changed" in task_changes(base, new)[0].words
    other = run(binary(300), responses="b")
    assert "no multiple-choice items" in outcome("task.sums.flips<=2%", other, other)[1]
    with pytest.raises(BadInput, match="limit its value"):
        parse_gate("task.sums.flips<=+2%")
