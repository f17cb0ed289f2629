"""Regressions of other engines in model code and sampling, each tested here.

A test's name begins with the project and the number of its issue. Offsets beyond 2^31 elements
(vllm#47671, vllm#50427, sglang#20389) take gigabytes and are for a GPU's tests; recurrent state
(vllm#39273), swapping (vllm#546) and graphs (aprender#2030) do not exist here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.scheduling.block_pool import NULL_BLOCK
from llmopt.recipes import MODELS

STORY = [1, 403, 407, 261, 378, 432, 266, 358, 365, 436, 448, 402, 426, 403, 407, 261]
PROMPTS = [STORY, [1, 319, 417, 342], STORY[:5], [*STORY, 411, 418, 267], STORY[:12]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NGRAM = SpeculationConfig("ngram", ngram_min=2)
ITSELF = SpeculationConfig("draft", MODELS / "stories3M", num_tokens=3)


def engine(**options: Any) -> Engine:
    options = {"block_size": 4, "num_blocks": 128, **options}
    return Engine(EngineConfig(MODELS / "stories3M", dtype="float32", num_threads=1, **options))


def run(
    built: Engine, prompts: Sequence[list[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Tokens of the first completions of requests that come together."""
    for index, prompt in enumerate(prompts):
        built.add_request(str(index), prompt, params)
    tokens: list[list[int]] = [[] for _ in prompts]
    while built.has_unfinished():
        for output in built.step():
            if output.index == 0:
                tokens[int(output.request_id)].extend(output.new_token_ids)
    assert built.stats.kv_blocks_used == 0
    return tokens


@pytest.fixture(scope="module")
def plain() -> Engine:
    """Without a prefix cache."""
    return engine(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(plain) -> list[list[int]]:
    """The completion of each of `PROMPTS` alone."""
    return [run(plain, [prompt])[0] for prompt in PROMPTS]


def test_vllm_7018_a_batch_of_sequences_with_hits_and_without(alone):
    built = engine()
    assert run(built, PROMPTS[:1]) == alone[:1]
    assert run(built, PROMPTS) == alone
    assert built.stats.prefix_cache_hits >= 12


def test_vllm_7845_the_prefix_cache_changes_no_token(alone):
    built = engine(prefill_chunk_size=3)
    for _ in range(3):
        assert run(built, PROMPTS) == alone


def test_vllm_27878_penalties_see_the_tokens_of_an_in_flight_step(plain):
    params = SamplingParams(
        temperature=0, max_tokens=20, repetition_penalty=1.5, presence_penalty=0.7, ignore_eos=True
    )
    built = engine(async_scheduling=True)
    penalized = run(plain, PROMPTS, params)
    assert run(built, PROMPTS, params) == penalized != run(plain, PROMPTS)
    built.close()


@pytest.mark.parametrize("kv", ["auto", "fp8", "int8"])
def test_vllm_40875_and_40831_prompt_lookup_of_two_tokens_with_every_kind_of_cache(kv):
    draft_length = engine(speculation=NGRAM, kv_cache_dtype=kv)
    assert run(draft_length, PROMPTS) == run(engine(kv_cache_dtype=kv), PROMPTS)
    assert draft_length.stats.num_accepted_tokens > 0


def test_vllm_14649_and_3951_a_draft_that_is_the_model_itself_is_never_wrong(alone):
    """The draft model proposes other tokens if its cache misses a token or keeps a rejected one."""
    built = engine(speculation=ITSELF)
    assert run(built, PROMPTS) == alone
    assert run(built, PROMPTS) == alone, "behind hits"
    assert built.stats.num_accepted_tokens == built.stats.num_draft_tokens > 50


@pytest.mark.parametrize("draft_tokens", [NGRAM, ITSELF], ids=["ngram", "draft"])
def test_vllm_54360_speculation_leaves_the_prefix_hits_as_they_are(draft_tokens):
    hits = []
    for options in ({}, {"speculation": draft_tokens}):
        built = engine(**options)
        run(built, PROMPTS[:1])
        run(built, PROMPTS)
        hits.append(built.stats.prefix_cache_hits)
    assert hits[0] == hits[1] > 0


def test_vllm_43869_what_pads_a_batch_may_be_anything(alone):
    """The null block stands in for the blocks that a shorter sequence does not have."""
    built = engine()
    for layer in built.runner.cache.layers:
        for part in layer.parts:
            part[NULL_BLOCK].fill_(float("nan"))
    assert run(built, PROMPTS) == alone


def test_vllm_5404_the_likeliest_token_alone_is_the_greedy_one(plain):
    only = SamplingParams(temperature=0.9, top_k=1, max_tokens=16, ignore_eos=True, seed=3)
    narrow = SamplingParams(temperature=0.9, top_p=1e-9, max_tokens=16, ignore_eos=True, seed=3)
    assert run(plain, PROMPTS, only) == run(plain, PROMPTS) == run(plain, PROMPTS, narrow)


def test_mstar_254_among_equals_top_k_1_takes_the_one_that_argmax_takes(plain):
    def level(tokens: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores > scores.topk(5).values[-1], torch.ones_like(scores), scores)

    ties: dict[str, Any] = {"max_tokens": 12, "logits_processors": (level,), "ignore_eos": True}
    greedy = SamplingParams(temperature=0, **ties)
    only = SamplingParams(temperature=1.0, top_k=1, seed=7, **ties)
    assert run(plain, PROMPTS[:2], only) == run(plain, PROMPTS[:2], greedy)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_vllm_5898_greedy_tokens_do_not_depend_on_the_size_of_the_batch(plain, alone, size):
    many = [PROMPTS[i % len(PROMPTS)] for i in range(size)]
    assert run(plain, many) == [alone[i % len(PROMPTS)] for i in range(size)]


def test_transformers_45563_several_completions_each_sample_of_their_own(plain):
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    plain.add_request("n", STORY, params)
    found: dict[int, list[int]] = {}
    while plain.has_unfinished():
        for output in plain.step():
            found.setdefault(output.index, []).extend(output.new_token_ids)
    assert [len(found[index]) for index in range(4)] == [12] * 4
    assert len({tuple(tokens) for tokens in found.values()}) == 4
