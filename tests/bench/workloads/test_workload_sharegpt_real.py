"""The published ShareGPT rules on real conversations, written out once more and compared by count."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from llmopt.bench.workloads.sharegpt import sharegpt_workload
from llmopt.quant.source.load_processor import load_tokenizer

SHARED = Path(__file__).parents[4] / "shared" / "data"
FILES = ("dpo_en_300.json", "sharegpt_multiturn_128.json")
TOKENIZERS = ("gpt2", "mistral-7b")


def by_the_published_rules(entries, tokenizer, seed, forced, context):
    """Straight from the description of the filter: what is kept, and how many fall to each rule."""
    entries = [e for e in entries if len(e["conversations"]) >= 2]
    random.seed(seed)
    random.shuffle(entries)
    kept = []
    counts = {"short prompt": 0, "short answer": 0, "long prompt": 0, "long both": 0, "context": 0}
    for e in entries:
        turns = e["conversations"]
        # Ours: a system message goes in front of the question.
        num_questions = 1 + (turns[0]["from"] == "system")
        prompt_ids = tokenizer("\n\n".join(t["value"] for t in turns[:num_questions])).input_ids
        answer_ids = tokenizer(turns[num_questions]["value"]).input_ids
        n_in = len(prompt_ids)
        n_out = len(answer_ids) if forced is None else forced
        if n_in < 4:
            counts["short prompt"] += 1
        elif forced is None and n_out < 4:
            counts["short answer"] += 1
        elif n_in > 1024:
            counts["long prompt"] += 1
        elif n_in + n_out > 2048:
            counts["long both"] += 1
        elif n_in + n_out > context:
            counts["context"] += 1
        else:
            kept.append((tuple(prompt_ids), n_out))
    return kept, counts


WORDS = {
    "short prompt": "prompt under 4 tokens",
    "short answer": "answer under 4 tokens",
    "long prompt": "prompt over 1024 tokens",
    "long both": "prompt and answer over 2048 tokens",
    "context": "longer than the model's context",
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("forced", "context"), [(None, 10**6), (None, 512), (2, 10**6)])
def test_filter_on_real_conversations(
    file: str, name: str, forced: int | None, context: int
) -> None:
    path, folder = SHARED / "sharegpt" / file, SHARED / "tokenizers" / name
    if not path.is_file() or not folder.is_dir():
        pytest.skip(f"needs the real conversations {path} and {folder}, which are not shipped")
    tokenizer = load_tokenizer(folder)
    entries = json.loads(path.read_text(encoding="utf-8"))
    kept, counts = by_the_published_rules(entries, tokenizer, 3, forced, context)
    found = sharegpt_workload(
        tokenizer,
        num_prompts=10_000,
        max_model_len=context,
        path=path,
        seed=3,
        output_len=forced,
        oversample=False,
    )
    assert [(item.prompt_token_ids, item.output_len) for item in found.items] == kept
    said = {}
    for note in found.notes:
        count, reason = re.match(r"(\d+) conversations dropped: (.*)", note).groups()
        said[next(key for key, words in WORDS.items() if reason.startswith(words))] = int(count)
    assert said == {key: count for key, count in counts.items() if count}
    assert sum(said.values()) + len(kept) == len(entries)
    if context == 512:
        assert said["context"] > 0


def test_prompts_without_an_answer_are_no_conversation() -> None:
    path = SHARED / "sharegpt" / "sharegpt_v3_prompts_1000.json"
    if not path.is_file():
        pytest.skip(f"needs the real prompts {path}, which are not shipped")
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert not any(len(entry["conversations"]) >= 2 for entry in entries)
    from llmopt.base.errors import BadInput

    with pytest.raises(BadInput, match="no entry with two"):
        sharegpt_workload(
            load_tokenizer(Path(__file__).parents[3] / "recipes" / "models" / "stories3M"),
            num_prompts=5,
            max_model_len=512,
            path=path,
        )
