"""Needles: documents of a seed that fit their depth, exact scores, and verdicts on equal models."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.gate.score_checks import check_task
from llmopt.bench.quality.needles import (
    KINDS,
    QUESTION_TOKENS,
    REPLY_TOKENS,
    NeedleItem,
    needle_items,
    needles_of,
    scored_needles,
)
from llmopt.bench.quality.task_items import items_of
from llmopt.bench.record.result import RunData
from llmopt.recipes import MODELS
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODELS / "stories3M")


def test_documents_fit_their_depth_and_hold_every_line(tokenizer: Any) -> None:
    items = needle_items(tokenizer, [512, 2048, 4096], documents=2, seed=3)
    assert len(items) == 2 * 2 * len(KINDS)  # 512 tokens hold no document
    again = needle_items(tokenizer, [2048], documents=1, seed=3)
    assert [item.prompt for item in again] == [item.prompt for item in items[: len(KINDS)]]
    for item in items:
        assert all(f"{line}\n" in f"{item.document}\n" for line in item.needle.lines)
        count = len(tokenizer.encode(item.prompt, verbose=False))
        assert item.depth * 0.75 < count + REPLY_TOKENS < item.depth
        assert len(tokenizer.encode(item.needle.question + item.needle.lead)) < QUESTION_TOKENS
        # The answer cannot be read off the question.
        assert not any(word in item.needle.question for word in item.needle.expected)
    first, *others = items[: len(KINDS)]
    assert all(item.document == first.document for item in others)


def test_answers_are_scored_exactly() -> None:
    single, multi_key, tracking, aggregation = needles_of(random.Random(5))
    (secret,) = single.expected
    assert single.is_right(f" {secret}. The end, 1234567.")
    assert single.is_right(f"<think>1234567?</think>It is {int(secret):,}")
    assert not single.is_right(f"1234567 or {secret}") and not single.is_right("none")
    assert not single.is_right(f"{secret}1")
    assert multi_key.is_right(multi_key.expected[0])
    names = list(tracking.expected)
    assert tracking.is_right(", ".join(reversed(names)))
    assert not tracking.is_right(", ".join(names[1:]))
    assert not tracking.is_right(", ".join(["BCDFG", *names[1:]]))
    commonest = aggregation.expected
    assert aggregation.is_right(f"They are **{commonest[2]}**, {commonest[0]} and {commonest[1]}.")
    assert not aggregation.is_right(f"{commonest[0]}, {commonest[1]}, z9zz9")
    logged = " ".join(aggregation.lines)
    counts = {word: logged.count(word) for word in commonest}
    assert set(counts.values()) == {5}


def run_of(items: list[NeedleItem], right: np.ndarray) -> RunData:
    texts = [" ".join(i.needle.expected) if r else "" for i, r in zip(items, right, strict=True)]
    scored = scored_needles(items, texts)
    rows = [row for scoring in scored for row in scoring.rows]
    scores = items_of({scoring.task: scoring.samples for scoring in scored}, rows)
    record = {"metrics": rows, "error": None, "protocol": "p"}
    return RunData({"llmopt": {"tasks": record}}, items=scores)


def plain_items(count: int) -> list[NeedleItem]:
    return [
        NeedleItem(4096, number, f"document {number}", needle)
        for number in range(count)
        for needle in needles_of(random.Random(number))
    ]


def test_equal_models_seldom_break_a_promise_and_damage_does() -> None:
    """500 pairs of equal models that answer a third of the items by chance; a broken limit is an error."""
    items, rng = plain_items(16), np.random.default_rng(0)
    (limit,) = parse_gate("needles.4k>=-2%")
    broken = 0
    for _ in range(500):
        sides = [rng.random(len(items)) < 0.35 for _ in range(2)]
        verdict = check_task(limit, *(run_of(items, side) for side in sides))
        broken += verdict.outcome is GateOutcome.REGRESSION
    assert broken / 500 <= 0.025
    right = np.ones(len(items), bool)
    same = check_task(limit, run_of(items, right), run_of(items, right))
    assert same.outcome is GateOutcome.PASS and same.interval == (0, 0)
    damaged = run_of(items, np.arange(len(items)) % 4 > 0)  # one kind is lost
    verdict = check_task(limit, run_of(items, right), damaged)
    assert verdict.outcome is GateOutcome.REGRESSION
    assert verdict.key == "task.needles.exact_match.4k" and "16 lost" in verdict.reason
    (limit,) = parse_gate("task.needles_single.exact_match.4k>=-2%")
    verdict = check_task(limit, run_of(items, right), damaged)
    assert verdict.outcome is GateOutcome.REGRESSION
