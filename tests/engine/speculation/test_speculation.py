"""Speculative decoding changes the number of steps, and nothing else."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.execution.speculative_step import DraftChain, accepted_tokens
from llmopt.engine.sampling.rowwise import SamplingRow
from llmopt.engine.sampling.sampler import Sampler
from llmopt.engine.scheduling.draft_length import Acceptance, DraftLength, Tree
from llmopt.engine.speculation.proposer import DRAFT_STREAM, DraftTokens

NGRAM = SpeculationConfig("ngram", num_tokens=6, ngram_min=1)
DRAFT = SpeculationConfig("draft", "stories260K", num_tokens=5)
PROMPTS = [
    "Once upon a time there was a little girl named Lily. Lily",
    "The big dog and the big cat and the big",
    "One day, Tom",
    "Sam likes to eat. Sam likes to eat. Sam",
    "a",
    "The bird was happy because",
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, top_p=0.95, max_tokens=40, ignore_eos=True)


def generate(
    params: SamplingParams, speculation: SpeculationConfig | None, **options: Any
) -> tuple[list[list[int]], LLM]:
    llm = LLM("stories3M", dtype="float32", num_threads=1, speculation=speculation, **options)
    tokens = [one.token_ids for one in llm.generate(PROMPTS, params)]
    llm.engine.scheduler.check_integrity()
    return tokens, llm


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def plain(request: pytest.FixtureRequest) -> tuple[SamplingParams, list[list[int]]]:
    return request.param, generate(request.param, None)[0]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("speculation", [NGRAM, DRAFT], ids=["ngram", "draft"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"prefill_chunk_size": 3, "max_num_batched_tokens": 8, "max_num_seqs": 6},
        {"enable_prefix_caching": False},
        {"block_size": 4, "num_blocks": 30},
    ],
    ids=["plain", "alone", "chunks", "no-prefix-cache", "preempted"],
)
def test_the_tokens_are_those_without_speculation(
    plain: tuple[SamplingParams, list[list[int]]],
    speculation: SpeculationConfig,
    options: dict[str, Any],
) -> None:
    params, expected = plain
    tokens, llm = generate(params, speculation, **options)
    assert tokens == expected
    stats = llm.engine.stats
    assert stats.num_accepted_tokens > 0
    assert stats.num_generated_tokens == sum(map(len, tokens))
    assert stats.kv_blocks_used == 0
    if "num_blocks" in options:
        assert stats.num_preemptions > 0


def test_fewer_steps_with_a_good_draft() -> None:
    assert generate(GREEDY, DRAFT)[1].engine.stats.num_steps < 25
    assert generate(GREEDY, None)[1].engine.stats.num_steps == 40


def test_logprobs_penalties_and_forks_are_those_without_speculation() -> None:
    params = SamplingParams(
        temperature=0.8,
        seed=11,
        n=3,
        max_tokens=24,
        logprobs=2,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        min_tokens=10,
    )
    results = []
    for speculation in (None, DRAFT, NGRAM):
        llm = LLM("stories3M", dtype="float32", num_threads=1, speculation=speculation)
        results.append(llm.generate(PROMPTS[:3], params))
    for draft_token_ids in results[1:]:
        for one, other in zip(results[0], draft_token_ids, strict=True):
            for mine, theirs in zip(one.completions, other.completions, strict=True):
                assert mine.token_ids == theirs.token_ids
                assert mine.text == theirs.text
                assert mine.finish_reason == theirs.finish_reason
                assert mine.logprobs is not None and theirs.logprobs is not None
                for here, there in zip(mine.logprobs, theirs.logprobs, strict=True):
                    assert (here.token_id, here.rank) == (there.token_id, there.rank)
                    assert here.logprob == pytest.approx(there.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def engines() -> list[LLM]:
    """Engines without speculation, and with a draft model."""
    return [
        LLM("stories3M", dtype="float32", num_threads=1, speculation=speculation)
        for speculation in (None, DRAFT)
    ]


@pytest.mark.parametrize("stop", [("happy",), ("Lily",), (" the", "."), ("y",)])
def test_what_ends_a_text_ends_it_at_the_same_token(
    engines: list[LLM], stop: tuple[str, ...]
) -> None:
    """Several tokens come at once, and a stop string or EOS may be among them."""
    params = SamplingParams(temperature=0, max_tokens=60, stop=stop)
    results = [llm.generate(PROMPTS, params) for llm in engines]
    for one, other in zip(*results, strict=True):
        assert one.completions == other.completions


def test_rejection_keeps_the_greedy_tokens() -> None:
    expected = generate(GREEDY, None)[0]
    for method, model in (("ngram", None), ("draft", "stories260K")):
        speculation = SpeculationConfig(method, model, acceptance="rejection")
        assert generate(GREEDY, speculation)[0] == expected


def test_rejection_without_a_draft_token_samples_as_without_speculation() -> None:
    never = SpeculationConfig("ngram", ngram_min=64, ngram_max=64, acceptance="rejection")
    params = SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=12, logprobs=1)
    results = [
        LLM("stories3M", dtype="float32", num_threads=1, speculation=speculation).generate(
            PROMPTS[:2], params
        )
        for speculation in (None, never)
    ]
    for one, other in zip(*results, strict=True):
        assert one.completions == other.completions


SAMPLES = 50_000


@pytest.mark.whole
@pytest.mark.parametrize("certain", [False, True], ids=["draft", "ngram"])
def test_rejection_sampling_follows_the_target(certain: bool) -> None:
    """Chi-squared of the first three tokens, jointly, over a vocabulary of four."""
    vocab = 4
    generator = torch.Generator().manual_seed(0)
    # The distribution of a token depends on the one before it, as a model's would.
    target = torch.rand(vocab + 1, vocab, generator=generator).softmax(-1)
    draft = (3 * torch.rand(vocab + 1, vocab, generator=generator)).softmax(-1)
    sampler = Sampler()
    written: list[list[int]] = [[] for _ in range(SAMPLES)]
    while going := [seed for seed, tokens in enumerate(written) if len(tokens) < 3]:
        contexts = [[written[seed][-1] if written[seed] else vocab] for seed in going]
        places = [7 + len(written[seed]) for seed in going]
        for index in range(2):
            draft_tokens = [(context[0] + index) % vocab for context in contexts]
            if not certain:
                weights = draft[[context[-1] for context in contexts]]
                keys = [(seed, place + index) for seed, place in zip(going, places, strict=True)]
                draft_tokens = sampler.choose(weights, keys, DRAFT_STREAM)
            for context, draft_token in zip(contexts, draft_tokens, strict=True):
                context.append(draft_token)
        chains = []
        for context, seed, place in zip(contexts, going, places, strict=True):
            probabilities = None if certain else draft[context[:-1]]
            chain = DraftTokens(tuple(context[1:]), Tree.chain(2), probabilities)
            chains.append(DraftChain(target[context], chain, seed, place))
        for seed, own in zip(going, accepted_tokens(chains, sampler), strict=True):
            written[seed] += own
    counts = torch.zeros(vocab, vocab, vocab)
    for tokens in written:
        counts[tuple(tokens[:3])] += 1
    first, rest = target[vocab], target[:vocab]
    expected = SAMPLES * first[:, None, None] * rest[:, :, None] * rest[None, :, :]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 103.4  # 63 degrees of freedom: the 0.1 % point


def test_distributions_are_those_that_sampling_uses() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1)) * 2
    for top_k, top_p, min_p in product((0, 5), (1.0, 0.8), (0.0, 0.1)):
        params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
        rows = [SamplingRow(params, seed, [1, 2], 1) for seed in range(4000)]
        drawn = torch.tensor(Sampler().draw(logits.expand(4000, -1), rows)[0])
        expected = Sampler().distributions(logits, rows[:1])[0]
        assert not bool((expected[drawn] == 0).any())
        share = torch.bincount(drawn, minlength=12) / 4000
        assert float((share - expected).abs().max()) < 0.035  # over four standard deviations


@given(st.floats(0, 1), st.floats(0, 0.5), st.integers(1, 8))
def test_the_number_of_draft_tokens_grows_with_acceptance(
    rate: float, cost: float, longest: int
) -> None:
    rule = DraftLength(longest, cost)
    assert 1 <= rule.best(rate) <= longest
    assert rule.best(rate) <= rule.best(min(1.0, rate + 0.2))


def test_acceptance_follows_what_is_seen() -> None:
    seen = Acceptance()
    for _ in range(40):
        seen.record(4, 0)
    assert seen.rate < 0.1
    for _ in range(40):
        seen.record(4, 4)
    assert seen.rate > 0.9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "mamba"}, "choose ngram, draft, medusa, eagle"),
        ({"method": "draft"}, "give --draft-model"),
        ({"method": "eagle"}, "needs the folder of the heads"),
        ({"method": "ngram", "tree_width": 2}, "the draft tokens of ngram are a chain"),
        ({"method": "medusa", "draft_model": "x", "tree_width": 17}, "need 1 to 16"),
        ({"method": "ngram", "draft_model": "x"}, "leave one out"),
        ({"method": "ngram", "num_tokens": 0}, "need 1 to 64"),
        ({"method": "ngram", "ngram_min": 3, "ngram_max": 2}, "the smaller number first"),
        ({"method": "ngram", "acceptance": "always"}, "choose coupled or rejection"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        SpeculationConfig(**arguments)
