"""Prefix repetition, verse, hub rows and ramps: counts, lengths and what is shared."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.workloads.custom import hub_rows, hub_workload, prompt_and_answer
from llmopt.bench.workloads.datasets import build_workload, locate_dataset
from llmopt.bench.workloads.synthetic import prefix_repetition_workload, sonnet_workload
from llmopt.bench.workloads.workload import fit_lengths, ramp_offsets
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.recipes import MODELS


class Words:
    """A tokenizer with one token a word, and one special token in front."""

    all_special_ids = (0, 1, 2)

    def __len__(self) -> int:
        return 1000

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [3 + sum(map(ord, w)) % 997 for w in text.split()]


WORDS = Words()


def test_prefix_repetition_has_the_asked_prefixes_and_lengths() -> None:
    found = prefix_repetition_workload(
        WORDS, num_prompts=23, max_model_len=4096, num_prefixes=5, prefix_len=40, suffix_len=30
    )
    begun = Counter(item.prompt_token_ids[:40] for item in found.items)
    assert sorted(begun.values()) == [4, 4, 5, 5, 5]
    assert len({item.prompt_token_ids[40:] for item in found.items}) == 23
    assert {(len(i.prompt_token_ids), i.output_len) for i in found.items} == {(70, 128)}
    assert not {0, 1, 2} & {token for item in found.items for token in item.prompt_token_ids}
    again = prefix_repetition_workload(
        WORDS, num_prompts=23, max_model_len=4096, num_prefixes=5, prefix_len=40, suffix_len=30
    )
    assert again.sha256 == found.sha256


def test_prefix_repetition_defaults_are_those_of_vllm() -> None:
    found = prefix_repetition_workload(WORDS, num_prompts=20, max_model_len=4096)
    assert {(len(i.prompt_token_ids), i.output_len) for i in found.items} == {(512, 128)}
    assert len({item.prompt_token_ids[:256] for item in found.items}) == 10
    assert len({item.prompt_token_ids[:257] for item in found.items}) > 10


def test_prefix_repetition_shrinks_defaults_and_refuses_what_was_asked() -> None:
    found = prefix_repetition_workload(WORDS, num_prompts=10, max_model_len=128)
    assert all(len(i.prompt_token_ids) + i.output_len <= 128 for i in found.items)
    assert any("default lengths cut" in note for note in found.notes)
    with pytest.raises(BadInput, match="context is 128"):
        prefix_repetition_workload(WORDS, num_prompts=10, max_model_len=128, prefix_len=127)
    with pytest.raises(BadInput, match="fewer than"):
        prefix_repetition_workload(WORDS, num_prompts=9, max_model_len=128)


def test_fit_lengths_changes_only_unset_options() -> None:
    defaults = {"prefix": 100, "suffix": 300, "output": 100}
    found, notes = fit_lengths(
        {"prefix": None, "suffix": None, "output": 50}, defaults, 250, "--flag-"
    )
    assert found == {"prefix": 50, "suffix": 150, "output": 50}
    assert len(notes) == 1
    assert fit_lengths(dict.fromkeys(defaults), defaults, 500, "--flag-") == (defaults, [])
    with pytest.raises(BadInput, match="positive"):
        fit_lengths({"prefix": 1, "suffix": 0, "output": 1}, defaults, 500, "--flag-")


def test_sonnet_prompts_are_exact_and_share_their_beginning() -> None:
    tokenizer = load_tokenizer(MODELS / "stories3M")
    found = sonnet_workload(
        tokenizer, num_prompts=12, max_model_len=512, input_len=200, output_len=20, prefix_len=60
    )
    assert {(len(i.prompt_token_ids), i.output_len) for i in found.items} == {(200, 20)}
    assert len({item.prompt_token_ids[:60] for item in found.items}) == 1
    assert len({item.prompt_token_ids for item in found.items}) == 12
    text = tokenizer.decode(found.items[0].prompt_token_ids, skip_special_tokens=True)
    assert text.startswith("From fairest creatures we desire increase,\n")


def test_sonnet_input_len_counts_the_prefix() -> None:
    found = sonnet_workload(WORDS, num_prompts=2, max_model_len=4096)
    assert {(len(i.prompt_token_ids), i.output_len) for i in found.items} == {(550, 150)}
    found = sonnet_workload(WORDS, num_prompts=2, max_model_len=4096, input_len=100)
    assert {len(item.prompt_token_ids) for item in found.items} == {100}
    with pytest.raises(BadInput, match="positive"):
        sonnet_workload(WORDS, num_prompts=2, max_model_len=4096, input_len=50, prefix_len=50)


def test_hub_rows_of_every_form() -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e"}]},
        {"messages": [{"role": "user", "content": "a b"}]},
        {"question": "what is it", "answer": "a b c d"},
        {"instruction": "do", "output": ""},
        {"text": ""},
        {"prompt": "w " * 60},
        {"prompt": "w " * 40},
    ]
    found = hub_workload(WORDS, rows, source="rows", num_prompts=9, max_model_len=50)
    lengths = [(len(i.prompt_token_ids), i.output_len) for i in found.items]
    assert lengths == [(4, 3), (3, 47), (4, 5), (2, 48), (41, 9)]
    said = " ".join(found.notes)
    assert "1 prompts left out" in said and "1 rows left out" in said and "5 of 9" in said
    forced = hub_workload(WORDS, rows, source="rows", num_prompts=2, max_model_len=50, output_len=7)
    assert [item.output_len for item in forced.items] == [7, 7]
    with pytest.raises(BadInput, match="columns picture, label"):
        hub_workload(
            WORDS, [{"picture": 1, "label": 2}], source="x", num_prompts=1, max_model_len=9
        )


@pytest.mark.parametrize(("asked", "given"), [("instruction", "input"), ("instruction", "context")])
def test_what_a_question_is_about_is_in_the_prompt(asked: str, given: str) -> None:
    """Instructions of Alpaca and Dolly may have a text beside them."""
    rows = [{asked: "sum up", given: "a b c", "output": "d"}, {asked: "sum up", given: ""}]
    workload = hub_workload(
        WORDS, rows, source="rows", num_prompts=2, max_model_len=50, output_len=7
    )
    assert [len(item.prompt_token_ids) for item in workload.items] == [6, 3]
    assert prompt_and_answer(rows[0], "rows") == ("sum up\n\na b c", "d")
    assert prompt_and_answer({"input": "a b", asked: None}, "rows") is None


def test_hub_data_sets_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    options = BenchOptions(dataset="hf", dataset_path=Path("owner/name"))
    with pytest.raises(BadInput, match=r"pip install 'llmopt\[hub\]'"):
        build_workload(options, WORDS, 512)
    with pytest.raises(BadInput, match="OWNER/NAME"):
        locate_dataset("hf", None)


def test_hub_rows_through_the_real_package(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the package datasets (extra: hub)")
    lines = [{"prompt": f"number {n} of them", "response": "a b c"} for n in range(5)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = list(hub_rows(str(tmp_path), subset=None, split="train", seed=1, shuffle=True))
    assert sorted(row["prompt"] for row in rows) == [line["prompt"] for line in lines]
    with pytest.raises(BadInput, match="cannot be read"):
        list(hub_rows(str(tmp_path / "none"), subset=None, split="train", seed=0, shuffle=False))


def test_constant_ramps() -> None:
    linear = ramp_offsets(5, "linear", 1.0, 5.0, burstiness=math.inf)
    assert np.diff(linear, prepend=0) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    steep = ramp_offsets(3, "exponential", 1.0, 100.0, burstiness=math.inf)
    assert np.diff(steep, prepend=0) == pytest.approx([1, 0.1, 0.01])
    assert ramp_offsets(1, "linear", 2.0, 9.0, burstiness=math.inf) == pytest.approx([0.5])


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_sampled_ramps_follow_the_rate(strategy: str) -> None:
    due = ramp_offsets(4000, strategy, 1.0, 10.0, seed=5)
    gaps = np.diff(due, prepend=0)
    assert (gaps >= 0).all()
    done = np.arange(4000) / 3999
    rates = 1 + 9 * done if strategy == "linear" else 10.0**done
    # Each gap times its rate is drawn from Exponential(1): mean 1 with an error of 1/sqrt(n).
    for part in np.split(gaps * rates, 4):
        assert part.mean() == pytest.approx(1, abs=0.13)


def test_ramp_options() -> None:
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 2.0, "ramp_up_end_rps": 8.0}
    options = checked(BenchOptions, {**ramp, "num_prompts": 10}, "here")
    assert options.concurrency is None
    found = build_workload(options, WORDS, 512)
    due = [item.arrival_seconds for item in found.items]
    assert due == list(ramp_offsets(10, "linear", 2.0, 8.0))
    for values, said in (
        ({"ramp_up_strategy": "linear"}, "here: a ramp needs"),
        ({**ramp, "request_rate": 3.0}, "not both"),
        ({**ramp, "ramp_up_strategy": "steep"}, "ramp_up_strategy"),
    ):
        with pytest.raises(BadInput, match=said):
            checked(BenchOptions, values, "here")
