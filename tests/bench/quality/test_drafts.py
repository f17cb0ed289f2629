"""Acceptance of draft tokens: by request and position, paired between models, and as the engine counts it."""

from __future__ import annotations

import numpy as np
import pytest
from llmopt.bench.gate.limits import GateOutcome, TaskScored, parse_gate
from llmopt.bench.gate.score_checks import check_task
from llmopt.bench.metrics.trace import RequestTrace
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.quality.drafts import draft_scores
from llmopt.bench.record.result import RunData
from llmopt.bench.session.run_sessions import run_bench
from llmopt.engine.config.config import SpeculationConfig


def trace(name: str, tokens: list[int], *, success: bool = True) -> RequestTrace:
    return RequestTrace(name, 8, sum(tokens), 0.0, 0.0, chunk_tokens=tokens, success=success)


def run_of(traces: list[RequestTrace]) -> RunData:
    rows, items = draft_scores(traces, 3)
    record = {"metrics": rows, "error": None, "protocol": "measured requests"}
    return RunData({"llmopt": {"tasks": record}}, items=items)


def test_steps_are_counted_by_request_and_position() -> None:
    traces = [trace("a", [1, 4, 2, 1, 3]), trace("b", [1, 1]), trace("c", [9], success=False)]
    rows, items = draft_scores([*traces, trace("d", [1, 2, 4, 1])], 3)
    values = {(row["metric"], row["filter"]): row["value"] for row in rows}
    assert values["acceptance_length", "none"] == (4 + 2 + 1 + 2 + 4) / 5
    assert [values["accepted", str(n)] for n in (1, 2, 3)] == [4 / 5, 2 / 5, 2 / 5]
    scored = items.of("drafts", "acceptance_length", "none")
    assert scored is not None and [name for _, name in scored.keys] == ["a", "b", "d"]
    assert scored.values.tolist() == [7, 0, 6] and scored.weights.tolist() == [3, 0, 2]
    assert draft_scores([trace("b", [1, 1])], 3)[0] == []


def drawn(rng: np.random.Generator, acceptance: float) -> list[RequestTrace]:
    """Requests with an acceptance of their own, around that of the model."""
    traces = []
    for number in range(48):
        chance = np.clip(acceptance + rng.normal(0, 0.05), 0, 1)
        steps = 1 + (rng.random((25, 3)) < chance).cumprod(axis=1).sum(axis=1)
        traces.append(trace(str(number), [1, *map(int, steps), 1]))
    return traces


def test_equal_drafts_seldom_break_a_promise_and_worse_ones_do() -> None:
    rng = np.random.default_rng(1)
    (limit,) = parse_gate("accept>=-5%")
    assert limit.quantity == TaskScored("task.drafts.acceptance_length")
    broken = 0
    for _ in range(500):
        pair = (run_of(drawn(rng, 0.7)) for _ in range(2))
        broken += check_task(limit, *pair).outcome is GateOutcome.REGRESSION
    assert broken / 500 <= 0.025
    base = run_of(drawn(rng, 0.7))
    assert check_task(limit, base, base).outcome is GateOutcome.PASS
    worse = check_task(limit, base, run_of(drawn(rng, 0.5)))
    assert worse.outcome is GateOutcome.REGRESSION
    assert worse.change is not None and worse.change < -0.15
    (position,) = parse_gate("task.drafts.accepted.1>=-5%")
    assert check_task(position, base, run_of(drawn(rng, 0.5))).outcome is GateOutcome.REGRESSION


def test_a_run_with_drafts_has_what_the_engine_counts() -> None:
    draft = SpeculationConfig(method="draft", draft_model="stories260K", num_tokens=3)
    load = {
        "num_prompts": 4,
        "output_len": 24,
        "num_runs": 1,
        "num_warmups": 0,
        "max_redone_passes": 0,
    }
    options = BenchOptions(
        model="stories3M", speculation=draft, quality=False, report=False, num_threads=1, **load
    )
    run = run_bench(options)
    ours = run.result["llmopt"]
    steps = [n for t in run.passes[0].traces for n in t.chunk_tokens[1:]]
    # The last chunk of a request may be cut, which the engine does not count.
    accepted = ours["speculation"]["num_accepted"]
    assert accepted - 3 * 4 <= sum(steps) - len(steps) <= accepted
    rows = {(row["metric"], row["filter"]): row["value"] for row in ours["tasks"]["metrics"]}
    assert 1 < rows["acceptance_length", "none"] <= 4
    shares = [rows["accepted", str(position)] for position in (1, 2, 3)]
    assert rows["acceptance_length", "none"] == pytest.approx(1 + sum(shares))
    assert shares == sorted(shares, reverse=True) and run.items is not None
