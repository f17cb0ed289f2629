"""Token equality: with transformers, and under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.recipes import DATA, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = MODELS / "stories3M"
MAX_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """50 beginnings of held-out stories, from a few words to all but the last sentence."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stories = [s for s in (DATA / "evaluation.txt").read_text().split("\n\n") if s.strip()]
    ids = [tokenizer(story).input_ids for story in stories[:50]]
    lengths = [4 + (37 * i) % 150 if i % 4 else len(ids[i]) - 12 for i in range(50)]
    return [tokens[: min(length, 400)] for tokens, length in zip(ids, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(prompts) -> list[list[int]]:
    """Output of transformers' generate, one prompt at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
        )
        outputs.append(whole[0, len(prompt) :].tolist())
    assert sum(len(tokens) < MAX_TOKENS for tokens in outputs) > 2, (
        "some of them should end by themselves"
    )
    return outputs


def engine(**options) -> Engine:
    return Engine(EngineConfig(MODEL, dtype="float32", **options))


def run(
    engine: Engine, prompts: list[list[int]], arrive_every: int = 0, params=GREEDY
) -> list[list[int]]:
    """Greedy tokens of all prompts; `arrive_every` steps between one request and the next."""
    tokens: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
    steps = 0
    while waiting or engine.has_unfinished():
        while waiting and (arrive_every == 0 or steps % arrive_every == 0):
            index, prompt = waiting.pop(0)
            engine.add_request(str(index), prompt, params)
            if arrive_every:
                break
        for output in engine.step():
            tokens[int(output.request_id)].extend(output.new_token_ids)
        engine.scheduler.check_integrity()
        steps += 1
    assert engine.stats.kv_blocks_used == 0
    return tokens


@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.whole), 5, 50])
def test_greedy_tokens_equal_transformers_in_any_batch(prompts, expected, max_num_seqs):
    assert run(engine(max_num_seqs=max_num_seqs), prompts) == expected


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("caching", [True, False])
def test_greedy_tokens_do_not_depend_on_chunks_or_caching(prompts, expected, chunk, caching):
    built = engine(prefill_chunk_size=chunk, enable_prefix_caching=caching, block_size=8)
    assert run(built, prompts[:20]) == expected[:20]
    assert run(built, prompts[:20]) == expected[:20], "the second time with whatever is cached"
    assert (built.stats.prefix_cache_hits > 500) == caching


@pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.whole), 16])
def test_greedy_tokens_do_not_depend_on_preemption(prompts, expected, block_size):
    few = engine(block_size=block_size, num_blocks=640 // block_size, max_num_seqs=16)
    assert run(few, prompts) == expected
    assert few.stats.num_preemptions > 5, "the pool was meant to be too small"


@pytest.mark.parametrize("arrive_every", [1, pytest.param(3, marks=pytest.mark.whole)])
def test_greedy_tokens_do_not_depend_on_arrivals(prompts, expected, arrive_every):
    assert run(engine(max_num_batched_tokens=48, max_num_seqs=8), prompts, arrive_every) == expected


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"prefill_chunk_size": 7, "block_size": 8},
        {"max_num_batched_tokens": 48, "max_num_seqs": 8},
        {"block_size": 16, "num_blocks": 40, "max_num_seqs": 16},
    ],
    ids=["at once", "chunks", "small steps", "preemption"],
)
def test_greedy_tokens_do_not_depend_on_the_loop(prompts, expected, limits):
    built = engine(async_scheduling=True, **limits)
    assert run(built, prompts, arrive_every=2) == expected
    assert run(built, prompts[:20]) == expected[:20], "the second time with whatever is cached"
    assert ("num_blocks" in limits) == (built.stats.num_preemptions > 5)
    built.close()


def test_random_tokens_do_not_depend_on_the_batch_either(prompts):
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=5, max_tokens=20)
    together = run(engine(), prompts[:12], params=params)
    alone = [
        run(built, [prompt], params=params)[0] for built in [engine()] for prompt in prompts[:12]
    ]
    squeezed = run(engine(num_blocks=40, block_size=16), prompts[:12], params=params)
    overlapped = run(engine(async_scheduling=True), prompts[:12], params=params)
    assert together == alone == squeezed == overlapped


@pytest.mark.parametrize("overlapped", [False, True])
def test_every_completion_of_a_fork_equals_its_own_request(prompts, overlapped):
    """n = 3 samples what three requests with the three seeds sample."""
    built = engine(block_size=4, async_scheduling=overlapped)
    prompt = prompts[0] + [7]
    built.add_request("n", prompt, SamplingParams(n=3, seed=9, max_tokens=12, ignore_eos=True))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while built.has_unfinished():
        for output in built.step():
            tokens[output.index].extend(output.new_token_ids)
    for index in range(3):
        own = SamplingParams(seed=9 + index, max_tokens=12, ignore_eos=True)
        assert run(built, [prompt], params=own)[0] == tokens[index]
    assert len({tuple(t) for t in tokens.values()}) == 3
