"""Which prompts a run sends, and when."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.workloads.custom import custom_workload
from llmopt.bench.workloads.datasets import build_workload, locate_dataset
from llmopt.bench.workloads.sharegpt import drop_reason, sharegpt_workload
from llmopt.bench.workloads.synthetic import length_range, random_workload, warmup_workload
from llmopt.bench.workloads.workload import Workload, arrival_offsets, numbered
from pydantic import ValidationError


class Words:
    """A tokenizer with one token a word, and one special token in front."""

    all_special_ids = (0, 1, 2)

    def __len__(self) -> int:
        return 100

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [3 + len(word) % 97 for word in text.split()]


WORDS: Words = Words()


def conversation(prompt_words: int, answer_words: int) -> dict[str, object]:
    lengths = {"human": prompt_words, "gpt": answer_words}
    turns = [{"from": role, "value": " ".join(["w"] * n)} for role, n in lengths.items()]
    return {"id": f"{prompt_words}-{answer_words}", "conversations": turns}


def sharegpt_file(tmp_path: Path, entries: list[object]) -> Path:
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.mark.parametrize(
    ("prompt", "answer", "kept"),
    [
        (3, 10, False),
        (4, 4, True),
        (10, 3, False),
        (1024, 1024, True),
        (1025, 10, False),
        (1024, 1025, False),
        (1000, 1048, True),
        (1000, 1049, False),
    ],
)
def test_sharegpt_filter_boundaries(prompt: int, answer: int, kept: bool) -> None:
    assert (drop_reason(prompt, answer, length_is_forced=False) is None) == kept


def test_sharegpt_short_output_is_kept_when_the_length_is_forced() -> None:
    assert drop_reason(10, 1, length_is_forced=True) is None


def test_sharegpt_counts_what_it_drops(tmp_path: Path) -> None:
    one_message = {"conversations": [{"value": "a b c d e"}]}
    entries = [conversation(2, 9), conversation(9, 2), conversation(60, 60), conversation(5, 7)]
    path = sharegpt_file(tmp_path, [*entries, one_message, "no entry"])
    found = sharegpt_workload(WORDS, num_prompts=9, max_model_len=100, path=path, oversample=False)
    # Both sides carry the tokenizer's special token: 5 + 1 and 7 + 1.
    assert [(len(i.prompt_token_ids), i.output_len) for i in found.items] == [(6, 8)]
    assert len([note for note in found.notes if "dropped" in note]) == 3
    assert any("context of 100" in note for note in found.notes)
    assert not found.is_stand_in


def test_sharegpt_order_is_that_of_the_seeded_shuffle(tmp_path: Path) -> None:
    entries = [conversation(10 + n, 10) for n in range(20)]
    path = sharegpt_file(tmp_path, list(entries))
    expected = [11 + n for n in range(20)]
    random.Random(7).shuffle(expected)
    found = sharegpt_workload(WORDS, num_prompts=5, max_model_len=100, path=path, seed=7)
    assert [len(item.prompt_token_ids) for item in found.items] == expected[:5]
    plain = sharegpt_workload(WORDS, num_prompts=5, max_model_len=100, path=path, shuffle=False)
    assert [len(item.prompt_token_ids) for item in plain.items] == [11, 12, 13, 14, 15]


def test_sharegpt_oversamples_with_distinct_ids(tmp_path: Path) -> None:
    path = sharegpt_file(tmp_path, [conversation(8, 8), conversation(9, 9)])
    found = sharegpt_workload(WORDS, num_prompts=7, max_model_len=100, path=path)
    assert len({item.request_id for item in found.items}) == 7
    assert any("repeats" in note for note in found.notes)


def test_stand_in_says_so() -> None:
    found = sharegpt_workload(WORDS, num_prompts=4, max_model_len=512)
    assert found.is_stand_in
    assert "stand-in" in found.notes[0]
    assert "stand-in" in found.source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[\n{"a": 1},\n{"b" 2}\n]', "line 3"),
        ('{"a": 1}', "not a list"),
        ("[]", "no entry"),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "leaves no prompt"),
    ],
)
def test_sharegpt_bad_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        sharegpt_workload(WORDS, num_prompts=4, max_model_len=100, path=path)


def test_random_lengths_and_runs() -> None:
    assert length_range(100, 0.25) == (75, 125)
    assert length_range(10, 0.33) == (6, 14)
    found = random_workload(
        WORDS,
        num_prompts=50,
        max_model_len=100,
        input_len=20,
        output_len=10,
        range_ratio=0.5,
        prefix_len=7,
    )
    lengths = {len(item.prompt_token_ids) - 7 for item in found.items}
    assert min(lengths) >= 10 and max(lengths) <= 30 and len(lengths) > 5
    assert {item.output_len for item in found.items} <= set(range(5, 16))
    assert len({item.prompt_token_ids[:7] for item in found.items}) == 1
    allowed = list(range(3, 100))
    for item in found.items:
        run = [allowed.index(token) for token in item.prompt_token_ids[7:]]
        assert all((b - a) % len(allowed) == 1 for a, b in pairwise(run))


def test_random_fits_the_context_or_refuses() -> None:
    found = random_workload(WORDS, num_prompts=3, max_model_len=64)
    assert all(len(i.prompt_token_ids) + i.output_len <= 64 for i in found.items)
    with pytest.raises(BadInput, match="context is 64"):
        random_workload(WORDS, num_prompts=3, max_model_len=64, input_len=60, output_len=5)


def test_custom_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "a b c", "output_len": 5}, {"prompt": "a " * 95}, {"prompt": "b " * 200}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = custom_workload(
        WORDS, path, num_prompts=3, max_model_len=100, shuffle=False, oversample=False
    )
    assert [(len(i.prompt_token_ids), i.output_len) for i in found.items] == [(4, 5), (96, 4)]
    assert any("1 prompts left out" in note for note in found.notes)
    assert any("1 output lengths cut" in note for note in found.notes)
    given = custom_workload(
        WORDS, path, num_prompts=1, max_model_len=100, shuffle=False, output_len=7
    )
    assert [item.output_len for item in given.items] == [7]  # as vLLM's --custom-output-len


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\nnot json', "line 2: not JSON"),
        ('\n\n{"text": "a"}', "line 3: wants"),
        ('{"prompt": "a", "output_len": 0}', "line 1.*output_len"),
        ('{"prompt": "a", "output_len": true}', "line 1.*output_len"),
        ("\n", "is empty"),
    ],
)
def test_custom_bad_lines(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        custom_workload(WORDS, path, num_prompts=1, max_model_len=50)


def test_workload_identity() -> None:
    base = Workload("random", "x", numbered([((1, 2, 3), 4), ((5,), 6)]))
    assert base.sha256 == Workload("custom", "y", numbered([((1, 2, 3), 4), ((5,), 6)])).sha256
    others = [
        Workload("random", "x", numbered([((1, 2), 4), ((3, 5), 6)])),
        Workload("random", "x", numbered([((1, 2, 3), 5), ((5,), 6)])),
        base.with_arrivals([0.0, 0.5]),
    ]
    assert len({base.sha256, *(other.sha256 for other in others)}) == 4


def test_locate_dataset(tmp_path: Path) -> None:
    jsonl, plain = tmp_path / "a.jsonl", tmp_path / "a.json"
    jsonl.write_text("{}")
    plain.write_text("[]")
    assert locate_dataset("sharegpt", None) == ("sharegpt", None)
    assert locate_dataset("sharegpt", plain) == ("sharegpt", plain)
    assert locate_dataset(str(jsonl), None) == ("custom", jsonl)
    assert locate_dataset(str(plain), None) == ("sharegpt", plain)
    for dataset, path in (("custom", None), ("nonsense", None), (str(plain), jsonl)):
        with pytest.raises(BadInput):
            locate_dataset(dataset, path)


def test_warmup_shares_no_prompt_with_the_run() -> None:
    workload = build_workload(BenchOptions(num_prompts=6), WORDS, 512)
    warmup = warmup_workload(workload, 4, WORDS, seed=0)
    assert warmup is not None
    assert [len(i.prompt_token_ids) for i in warmup.items] == [
        len(i.prompt_token_ids) for i in workload.items[:4]
    ]
    begun = {item.prompt_token_ids[:4] for item in workload.items}
    assert not begun & {item.prompt_token_ids[:4] for item in warmup.items}
    assert warmup_workload(workload, 0, WORDS, seed=0) is None


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0])
def test_gamma_arrivals_end_at_the_asked_rate(burstiness: float) -> None:
    due = arrival_offsets(200, 4.0, burstiness=burstiness, seed=3)
    assert due[-1] == pytest.approx(200 / 4.0)
    assert (np.diff(due) >= 0).all() and due[0] > 0
    # The coefficient of variation of Gamma(k) is 1/sqrt(k).
    gaps = np.diff(due, prepend=0.0)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.35)
    assert (due == arrival_offsets(200, 4.0, burstiness=burstiness, seed=3)).all()


def test_other_arrivals() -> None:
    assert (arrival_offsets(5, math.inf) == 0).all()
    assert arrival_offsets(4, 2.0, burstiness=math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)):
        with pytest.raises(ValidationError):
            BenchOptions(request_rate=rate, burstiness=burstiness)


def test_load_defaults() -> None:
    assert (BenchOptions().concurrency, BenchOptions().rate) == (8, math.inf)
    assert BenchOptions(request_rate=2.0).concurrency is None
    assert BenchOptions(request_rate=math.inf).concurrency is None
    assert BenchOptions(request_rate=2.0, max_concurrency=3).concurrency == 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_promts": 3}, "unknown key 'num_promts'"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"percentile_metrics": "ttft,nope"}, "nope"),
        ({"goodput": ("itl:5",)}, "goodput"),
        ({"slowdown": 0.5}, "slowdown"),
    ],
)
def test_options_refuse(values: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        checked(BenchOptions, values, "somewhere")
