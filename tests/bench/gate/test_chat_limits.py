"""Limits on tool calls and lengths: equal models, known losses, and the number of items that tell them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.limits import parse_gate, parse_promises
from llmopt.bench.gate.score_checks import check_task, task_changes
from llmopt.bench.gate.verdict import LimitVerdict
from llmopt.bench.quality.chat_items import loops
from llmopt.bench.quality.domains import items_for_loss
from llmopt.bench.quality.task_items import COLUMNS, TaskItems
from llmopt.bench.record.result import RunData

PAIRS = 500


def run(task: str, metric: str, values: np.ndarray, name: str) -> RunData:
    count = len(values)
    columns = {
        "task": [task] * count,
        "doc_id": list(range(count)),
        "doc_hash": ["h"] * count,
        "metric": [metric] * count,
        "filter": ["none"] * count,
        "value": values,
        "weight": [1.0] * count,
        "response": [name] * count,
        "target": [""] * count,
    }
    assert set(columns) == set(COLUMNS)
    row = {"task": task, "metric": metric, "filter": "none", "value": float(values.mean())}
    row |= {"version": 1.0, "num_fewshot": 0, "aggregation": "mean", "higher_is_better": None}
    tasks = {"protocol": "p", "error": None, "metrics": [row]}
    return RunData({"llmopt": {"tasks": tasks}}, items=TaskItems(columns))


def verdict(limit: str, base: np.ndarray, new: np.ndarray) -> LimitVerdict:
    (parsed,) = parse_gate(limit)
    task, metric = parsed.quantity.key.split(".")[1:]
    return check_task(parsed, run(task, metric, base, "a"), run(task, metric, new, "b"))


def answered(
    rng: np.random.Generator, count: int, loss: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Right answers of two models to the same items, most of which are easy or hard for both."""
    chances = rng.beta(0.4, 0.2, count)
    base = rng.random(count) < chances
    return base.astype(float), (rng.random(count) < chances * (1 - loss)).astype(float)


def written(
    rng: np.random.Generator, count: int, longer: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of answers of two models to the same prompts."""
    mean = rng.lognormal(4.5, 0.8, count)
    noise = np.exp(rng.normal(-0.045, 0.3, (2, count)))
    base, new = np.rint(mean * noise[0]) + 1, np.rint(mean * noise[1] * (1 + longer)) + 1
    return base, new


def ended(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rare bad endings of two models: few prompts invite them, and some pairs of runs have none."""
    chances = rng.beta(0.1, 3, count)
    base, new = rng.random((2, count)) < chances
    return base.astype(float), new.astype(float)


ENDINGS = ("at_limit", "no_end", "loop")


@pytest.mark.parametrize(
    ("limit", "draw", "count"),
    [
        ("tools>=+0%", answered, 200),
        ("length<=+0%", written, 60),
        *((f"task.answers.{name}<=+0%", ended, 160) for name in ENDINGS),
    ],
)
def test_equal_models_break_a_limit_as_seldom_as_stated(
    limit: str, draw: object, count: int
) -> None:
    rng = np.random.default_rng(7)
    outcomes = Counter(verdict(limit, *draw(rng, count)).outcome.value for _ in range(PAIRS))  # type: ignore[operator]
    # 2.5 % of 500 are 12.5, and more than 22 of them have a chance of 0.5 %.
    assert outcomes["regression"] <= 22, outcomes


def test_equal_models_keep_a_limit_that_the_items_can_tell() -> None:
    rng = np.random.default_rng(3)
    kept = [verdict("length<=+25%", *written(rng, 120)).outcome.value for _ in range(100)]
    kept += [verdict("tools>=-20%", *answered(rng, 400)).outcome.value for _ in range(100)]
    assert Counter(kept)["pass"] >= 190 and "regression" not in kept


def test_known_changes_break_their_limit() -> None:
    rng = np.random.default_rng(5)
    outcomes = [verdict("length<=+5%", *written(rng, 200, 0.3)).outcome.value for _ in range(50)]
    outcomes += [verdict("tools>=-2%", *answered(rng, 400, 0.2)).outcome.value for _ in range(50)]
    assert Counter(outcomes)["regression"] >= 95


@pytest.mark.parametrize("name", ENDINGS)
def test_an_ending_that_only_the_new_model_has_breaks_its_limit(name: str) -> None:
    """A relative change from no bad ending has no value, but many new ones are a sure loss."""
    none, some, many = np.zeros(160), np.zeros(160), np.ones(160)
    some[0] = 1
    limit = f"task.answers.{name}<=+5%"
    outcomes = [verdict(limit, *sides).outcome.value for sides in ((none, many), (none, some))]
    outcomes += [verdict(limit, *sides).outcome.value for sides in ((many, none), (none, none))]
    assert outcomes == ["regression", "no verdict", "pass", "no verdict"]
    broken = verdict(limit, none, many)
    assert "inf" not in broken.reason, broken.reason


def test_the_items_that_an_undecided_limit_names_tell_such_a_loss() -> None:
    rng = np.random.default_rng(11)
    base, new = answered(rng, 100)
    check = verdict("tools>=-10%", base, new)
    assert check.outcome.value == "no verdict"
    sides = [run("tool_calls", "correct", side, name) for side, name in ((base, "a"), (new, "b"))]
    (change,) = task_changes(*sides)
    needed = change.items_for(0.1)
    assert f"about {needed:,} tell it from no change" in check.reason
    changed = float((base != new).mean())
    assert needed == items_for_loss(0.1 * float(base.mean()), changed)
    outcomes = [
        verdict("tools>=+0%", *answered(rng, needed, 0.1)).outcome.value for _ in range(200)
    ]
    assert Counter(outcomes)["regression"] >= 0.6 * 200


def test_the_items_of_a_length_follow_from_its_interval() -> None:
    base, new = written(np.random.default_rng(2), 100)
    sides = [run("answers", "tokens", side, name) for side, name in ((base, "a"), (new, "b"))]
    (change,) = task_changes(*sides)
    half = (change.interval[1] - change.interval[0]) / 2
    assert change.lost is None and change.items_for(half) == pytest.approx(
        100 * (2.80 / 1.96) ** 2, abs=2
    )


def test_the_names_of_limits_and_promises() -> None:
    length, tools = parse_gate("length<=+5% tools>=-2%")
    assert (length.quantity.key, tools.quantity.key) == (
        "task.answers.tokens",
        "task.tool_calls.correct",
    )
    assert parse_promises("tools>=-2% length<=+5%")[1].bound == 0.05
    endings = [f"task.answers.{name}<=+5%" for name in ENDINGS]
    assert [limit.bound for limit in parse_promises(" ".join(endings))] == [0.05] * 3
    wrong = [f"task.answers.{name}>=-5%" for name in ENDINGS]
    for text in ("tools<=+2%", "tools>=0.5", "length<=100", *wrong):
        with pytest.raises(BadInput, match=r"promise: task\.(tool_calls|answers)"):
            parse_promises(text)


def test_a_promise_on_drafts_is_refused_with_the_way_to_judge_them() -> None:
    with pytest.raises(BadInput, match=r"^promise: accept: .* without drafts: .* --gate"):
        parse_promises("accept>=-5%")


def test_loops_are_repeated_units_at_the_end() -> None:
    assert loops("Well. " + "and so on " * 10) and loops("!" * 120) and loops("x" * 50 + "yz" * 60)
    assert not loops("and so on " * 10 + "it ends with a sentence of its own.")
    assert not loops("The same again. " * 3) and not loops("." * 40) and not loops("")
    assert not loops("\n".join(f"{number}. a line of a list" for number in range(40)))
