"""Conversations as workload items: what each turn appends, what is cut, and how long it thinks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.options.values import ThinkTime
from llmopt.bench.workloads.conversations import (
    ChatSegments,
    ConversationBuilder,
    ConversationRules,
    SourceTurn,
)
from llmopt.bench.workloads.datasets import build_workload, read_frozen, write_frozen
from llmopt.bench.workloads.sharegpt import exchanges_of
from llmopt.bench.workloads.workload import Message
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.quant.source.models import resolve_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model(None))


@pytest.fixture
def chatml(tokenizer: Any) -> Any:
    tokenizer.chat_template = CHATML
    yield tokenizer
    tokenizer.chat_template = None


def said(*texts: str) -> list[SourceTurn]:
    """Exchanges of alternating questions and answers."""
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [SourceTurn((Message("user", asked),), answer) for asked, answer in pairs]


def test_a_template_is_split_at_the_answers(chatml: Any) -> None:
    first, second = ChatSegments(chatml).split(said("Hello", " one ", "More", "two"))
    assert chatml.decode(first) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.decode(second).lstrip() == (
        "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_rewrites_history_is_named(chatml: Any) -> None:
    chatml.chat_template = REWRITING
    builder = ConversationBuilder(chatml, ConversationRules(512))
    assert builder.item(said("Hello", "one", "More", "two")) is not None
    assert "renders earlier turns otherwise" in builder.notes()[0]


def test_without_a_template_prompts_are_those_of_the_server(tokenizer: Any) -> None:
    first, second = ChatSegments(tokenizer).split(said("Hello", "one", "More", "two"))
    assert first[0] == tokenizer.bos_token_id
    assert tokenizer.decode(first[1:]) == "User: Hello\nAssistant:"
    assert tokenizer.decode(second).lstrip() == "User: More\nAssistant:"


def test_a_thread_is_cut_to_the_context_and_a_long_one_dropped(tokenizer: Any) -> None:
    thread = [replace(turn, output_len=10) for turn in said(*["some words here"] * 8)]
    whole = ConversationBuilder(tokenizer, ConversationRules(512)).item(thread)
    assert whole is not None and len(whole.turns) == 3
    ends = [p + o for p, o in zip(whole.prompt_lens, whole.output_lens, strict=True)]
    tight = ConversationBuilder(tokenizer, ConversationRules(ends[2] - 1, min_turns=2))
    cut = tight.item(thread)
    assert cut is not None and len(cut.turns) == 1
    assert cut.prompt_lens[-1] + 10 <= ends[2] - 1
    tiny = ConversationBuilder(tokenizer, ConversationRules(ends[1] - 1, min_turns=2))
    assert tiny.item(thread) is None
    assert any("1 conversations cut to the turns that fit" in note for note in tight.notes())
    assert any("1 conversations dropped: longer than" in note for note in tiny.notes())


def test_the_data_sets_answers_can_be_the_history(tokenizer: Any) -> None:
    rules = ConversationRules(512, history="dataset")
    item = ConversationBuilder(tokenizer, rules).item(said("Hello", "a fixed answer", "More", "x"))
    assert item is not None
    (turn,) = item.turns
    prompt = turn.prompt(item.prompt_token_ids, [7, 7, 7])
    assert "a fixed answer" in tokenizer.decode(prompt) and len(prompt) == item.prompt_lens[1]
    assert turn.answer == "a fixed answer"


def test_threads_end_where_roles_break() -> None:
    def messages(*roles: str) -> list[dict[str, str]]:
        return [{"from": role, "value": f"{role} {n}"} for n, role in enumerate(roles)]

    assert [e.answer for e in exchanges_of(messages("human", "gpt", "human", "gpt"))] == [
        "gpt 1",
        "gpt 3",
    ]
    # A question without an answer is none, an answer without a question is left out.
    assert len(exchanges_of(messages("gpt", "human", "gpt", "human"))) == 1
    assert exchanges_of(messages("human", "human", "gpt")) == []
    (first,) = exchanges_of(messages("system", "human", "gpt", "tool"))
    assert [message.role for message in first.messages] == ["system", "user"]
    assert exchanges_of([{"from": "human", "value": "a"}, {"from": "gpt"}]) == []


def test_the_stand_in_has_threads(tokenizer: Any) -> None:
    options = BenchOptions(multi_turn=True, num_prompts=40, seed=3)
    workload = build_workload(options, tokenizer, 512)
    assert len(workload.items) == 40 and all(item.turns for item in workload.items)
    assert workload.num_requests == sum(1 + len(item.turns) for item in workload.items)
    assert workload.sha256 == build_workload(options, tokenizer, 512).sha256
    thinking = options.model_copy(update={"think_time": "uniform:1:2"})
    paused = build_workload(thinking, tokenizer, 512)
    assert paused.sha256 != workload.sha256 and 1 <= paused.mean_think_seconds <= 2
    short = options.model_copy(update={"multi_turn_max_turns": 2})
    assert {len(i.turns) for i in build_workload(short, tokenizer, 512).items} == {1}


def test_a_file_without_threads_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    entry = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    path = tmp_path / "single.json"
    path.write_text(json.dumps([entry] * 3))
    options = BenchOptions(multi_turn=True, dataset=str(path))
    with pytest.raises(BadInput, match="3 conversations dropped: under 2 turns"):
        build_workload(options, tokenizer, 512)
    with pytest.raises(BadInput, match="random has none"):
        build_workload(BenchOptions(multi_turn=True, dataset="random"), tokenizer, 512)


def test_agentic_sessions_share_a_prompt_and_grow(chatml: Any) -> None:
    options = BenchOptions(
        dataset="agentic",
        num_prompts=5,
        agentic_num_turns=4,
        agentic_system_len=100,
        agentic_tool_output_len=20,
        agentic_tool_output_growth=2.0,
        agentic_output_len=8,
    )
    workload = build_workload(options, chatml, 1024)
    prompts = [item.prompt_token_ids for item in workload.items]
    assert len({prompt[:90] for prompt in prompts}) == 1 and len(set(prompts)) == 5
    for item in workload.items:
        assert item.output_lens == (8, 8, 8, 8)
        added = [len(turn.token_ids) for turn in item.turns]
        # The results have 20, 40 and 80 tokens, behind the same words of the template.
        assert [b - a for a, b in pairwise(added)] == pytest.approx([20, 40], abs=6)
        assert all("<tool_response>" in turn.messages[0].content for turn in item.turns)
    assert workload.sha256 == build_workload(options, chatml, 1024).sha256
    # Defaults shrink to the context, lengths that were asked for do not.
    default = build_workload(BenchOptions(dataset="agentic", num_prompts=2), chatml, 512)
    assert any("default lengths cut" in note for note in default.notes)
    assert any("turns instead of 8" in note for note in default.notes)
    assert all(item.prompt_lens[-1] + item.output_lens[-1] <= 512 for item in default.items)
    assert {1 + len(item.turns) for item in default.items} == {4}
    with pytest.raises(BadInput, match="do not fit"):
        build_workload(options.model_copy(update={"agentic_system_len": 900}), chatml, 512)


def test_frozen_conversations_come_back(tokenizer: Any, tmp_path: Path) -> None:
    options = BenchOptions(
        multi_turn=True, num_prompts=3, multi_turn_history="dataset", think_time="exponential:1"
    )
    workload = build_workload(options, tokenizer, 512)
    path = tmp_path / "w.jsonl"
    write_frozen(workload, path, model="stories3M")
    again = read_frozen(path, tokenizer, max_model_len=512)
    assert again.items == workload.items and again.history == "dataset"
    with pytest.raises(BadInput, match="--think-time is drawn when"):
        build_workload(BenchOptions(dataset=str(path), think_time="1"), tokenizer, 512)
    changed = path.read_text().replace("think_seconds", "think", 1)
    path.write_text(changed)
    with pytest.raises(BadInput, match="line 2: wants"):
        read_frozen(path, tokenizer, max_model_len=512)


@pytest.mark.parametrize(
    ("text", "mean"),
    [("2", 2), ("0.5s", 0.5), ("exponential:2", 2), ("uniform:1:3", 2), ("lognormal:2:1", 2)],
)
def test_think_times_have_their_mean(text: str, mean: float) -> None:
    sample = ThinkTime.parse(text).sample(np.random.default_rng(0), 20_000)
    assert np.mean(sample) == pytest.approx(mean, rel=0.05) and min(sample) >= 0


@pytest.mark.parametrize("text", ["", "-1", "x", "uniform:3:1", "normal:1", "lognormal:0:1", "nan"])
def test_think_times_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match="--think-time"):
        ThinkTime.parse(text)


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("1.5m", 90), ("45", 45), ("1h", 3600)])
def test_durations(text: str, seconds: float) -> None:
    options = BenchOptions.model_validate({"duration": text})
    assert options.duration == seconds


def test_a_duration_needs_a_limit(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="write a duration"):
        BenchOptions.model_validate({"duration": "soon"})
    everything = BenchOptions(duration=1.0, request_rate=float("inf"), num_prompts=2)
    with pytest.raises(BadInput, match="nothing limits it"):
        build_workload(everything, tokenizer, 512)
