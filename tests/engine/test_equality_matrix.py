"""Greedy tokens of the trained model are transformers', whichever two of these features are on together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.recipes import DATA, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = MODELS / "stories3M"
MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"prefill_chunk_size": 7},
    "batch mix": {"max_num_seqs": 3, "max_num_batched_tokens": 24},
    "preemption": {"num_blocks": 26},
    "exact KV cache": {"kv_cache_dtype": "float32"},
    "ngram": {"speculation": SpeculationConfig("ngram", ngram_min=1)},
    "draft": {"speculation": SpeculationConfig("draft", MODELS / "stories260K")},
    "async scheduling": {"async_scheduling": True},
    "policy": {"scheduling_policy": "shortest-prefill"},
}
PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) != {"ngram", "draft"}]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Beginnings of held-out stories, and some that go on from another."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stories = [s for s in (DATA / "evaluation.txt").read_text().split("\n\n") if s.strip()]
    ids = [tokenizer(story).input_ids for story in stories[:6]]
    starts = [one[: 5 + 23 * i] for i, one in enumerate(ids)]
    return [*starts, ids[3][:90], ids[5][:64]]


@pytest.fixture(scope="module")
def expected(prompts) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
        )
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


def engine(**options: Any) -> Engine:
    options = {"block_size": 8, "num_blocks": 160, **options}
    return Engine(EngineConfig(MODEL, dtype="float32", num_threads=1, **options))


def run(built: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Half of the requests at once, then one with every step."""
    waiting = list(enumerate(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    first = len(prompts) // 2
    while waiting or built.has_unfinished():
        for index, prompt in waiting[:first]:
            built.add_request(str(index), prompt, GREEDY)
        del waiting[:first]
        first = 1
        for output in built.step():
            tokens[int(output.request_id)].extend(output.new_token_ids)
        built.scheduler.check_integrity()
    assert built.stats.kv_blocks_used == 0
    return tokens


@pytest.mark.sweep(6)
@pytest.mark.parametrize("pair", PAIRS, ids=" x ".join)
def test_two_features_leave_the_tokens_as_they_are(prompts, expected, pair):
    built = engine(**FEATURES[pair[0]], **FEATURES[pair[1]])
    assert run(built, prompts) == expected
    assert run(built, prompts) == expected, "the second time with whatever is cached"
    stats = built.stats
    built.close()
    assert (stats.prefix_cache_hits > 0) == ("no prefix cache" not in pair)
    assert stats.num_preemptions > 0 or "preemption" not in pair or "batch mix" in pair
    assert (stats.num_accepted_tokens > 0) == bool({"ngram", "draft"} & set(pair))


@pytest.fixture(scope="module")
def divided() -> Iterator[list[Engine]]:
    """Processes take seconds to start: every feature is met by one of two pairs of them."""
    first = ["chunks", "preemption", "exact KV cache", "draft", "async scheduling"]
    second = ["no prefix cache", "batch mix", "ngram", "policy"]
    assert {*first, *second} == set(FEATURES)
    engines = []
    for names in (first, second):
        options: dict[str, Any] = {}
        for name in names:
            options |= FEATURES[name]
        engines.append(engine(tensor_parallel_size=2, **options))
    yield engines
    for built in engines:
        built.close()


@pytest.mark.whole
def test_tensor_parallel_with_each_of_them_leaves_the_tokens_as_they_are(
    prompts, expected, divided
):
    for built in divided:
        assert run(built, prompts) == expected
        assert run(built, prompts) == expected
