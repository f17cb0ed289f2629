"""Needles on a backend: as completions, as conversations, with and without tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.quality.needles import KINDS
from llmopt.bench.session.session import RunProgress
from llmopt.bench.session.tasks import TaskGeneration, check_template, prepare_tasks, run_tasks
from llmopt.recipes import MODELS
from transformers import AutoTokenizer


class Reader:
    """A backend that answers the question on the archive number from the document, and no other."""

    max_inputs = longest = 4096
    chat_form = "chats"

    def __init__(self, *, sends_messages: bool) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(MODELS / "stories3M")
        self.sends_messages = sends_messages
        self.seen: list[TaskGeneration] = []

    def score(self, windows: Sequence[Any], what: str) -> Any:
        raise AssertionError("needles are generated")

    def converse(self, chats: Sequence[Any], what: str) -> Any:
        raise AssertionError("needles are no chats with tools")

    def generate(self, requests: Sequence[TaskGeneration], what: str) -> list[str]:
        self.seen += requests
        texts = [
            self.tokenizer.decode(request.token_ids)
            if request.messages is None
            else request.messages[-1]["content"]
            for request in requests
        ]
        mark = "special archive number is: "
        return [
            text.partition(mark)[2][:8] if "What is the special" in text else "" for text in texts
        ]


@pytest.mark.parametrize("sends_messages", [False, True])
def test_needles_are_tasks_of_each_depth(*, sends_messages: bool) -> None:
    options = BenchOptions(quality_depth="1k,2k", quality_documents=2)
    backend = Reader(sends_messages=sends_messages)
    tasks = prepare_tasks(options.task_names, options)
    check_template(options, backend, tasks)
    scores = run_tasks(tasks, backend, options)
    assert scores.record["error"] is None
    values = {(row["task"], row["filter"]): row["value"] for row in scores.record["metrics"]}
    for depth in ("1k", "2k"):
        assert values["needles", depth] == 1 / len(KINDS)
        assert values["needles_single", depth] == 1 and values["needles_tracking", depth] == 0
    items = scores.items.of("needles", "exact_match", "2k")
    assert items is not None and len(items.keys) == len(set(items.keys)) == 2 * len(KINDS)
    assert len(backend.seen) == 4 * len(KINDS)
    stops = {request.params.stop for request in backend.seen}
    assert stops == ({()} if sends_messages else {("\n",)})
    assert all(len(request.token_ids) < 2048 for request in backend.seen)


def test_needles_are_left_out_or_refused() -> None:
    options = BenchOptions(quality_depth="1k", needles=False)
    assert not options.task_names
    record = run_tasks(prepare_tasks(()), Reader(sends_messages=False), options).record
    assert record["metrics"] == [] and record["error"] is None
    template = {"quality_depth": "1k", "apply_chat_template": True}
    with pytest.raises(BadInput, match="has no chat template"):
        options = checked(BenchOptions, template, "option")
        tasks = prepare_tasks(options.task_names, options)
        check_template(options, Reader(sends_messages=False), tasks)
    with pytest.raises(BadInput, match="are asked at --quality-depth"):
        checked(BenchOptions, {"tasks": "needles"}, "option")
    with pytest.raises(BadInput, match="leave --lora away"):
        checked(BenchOptions, {"quality_depth": "1k", "lora": {"a": "folder"}}, "option")


def test_progress_counts_a_stage_for_needles() -> None:
    options = BenchOptions(quality_depth="1k")
    assert options.task_names and RunProgress.of(None, options).seconds_left > 0
    assert json.loads(options.model_dump_json())["quality_depth"] == [1024]
