"""Tree attention: the ancestors each draft token sees; trees change the number of steps and nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.cache.kv_cache import KvCache, stored_dtype
from llmopt.engine.cache.step_inputs import Run, step_inputs
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.model.adapter.open import open_model
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.engine.sampling.rowwise import SamplingRow
from llmopt.engine.sampling.sampler import Sampler
from llmopt.engine.scheduling.block_pool import Window
from llmopt.engine.scheduling.draft_length import Tree
from llmopt.engine.scheduling.request import TokenView
from llmopt.engine.scheduling.step_plan import ScheduledRow
from llmopt.engine.speculation.proposer import (
    DraftTokens,
    SamplingRowOf,
    TargetStates,
    TreeExpansion,
)
from llmopt.quant.source.models import open_checkpoint

from ...support.attention_reference import attend_reference
from ...support.heads_world import write_medusa
from ...support.model_families import FAMILIES, save_model

#     0 1       two draft tokens for the first position
#    2 3 4      two behind 0, one behind 1
#      5 6      behind 3 and behind 4
TREE = Tree((-1, -1, 0, 0, 1, 3, 4))
DRAFT_TOKENS = (11, 12, 13, 14, 15, 16, 17)
CPU = torch.device("cpu")

parents_of_trees = st.integers(1, 9).flatmap(
    lambda count: st.tuples(*(st.integers(-1, index - 1) for index in range(count)))
)


@given(parents_of_trees)
def test_paths_and_depths_agree(parents: tuple[int, ...]) -> None:
    tree = Tree(parents)
    for index, depth in enumerate(tree.depths):
        path = tree.path(index)
        assert len(path) == depth and path[-1] == index
        assert [parents[i] for i in path] == [-1, *path[:-1]]
    assert tree.depth == max(tree.depths)
    assert tree.is_chain == (tree.depths == tuple(range(1, len(parents) + 1)))


@settings(max_examples=60, deadline=None)
@given(
    parents_of_trees,
    st.integers(1, 12),
    st.integers(0, 3),
    st.sampled_from(
        [
            pa.AttentionRule(0.3),
            pa.AttentionRule(0.3, window=3),
            pa.AttentionRule(0.3, window=4, num_sink_tokens=2),
            pa.AttentionRule(0.3, chunk=4),
            pa.AttentionRule(0.3, softcap=2.0),
        ]
    ),
)
def test_attention_over_a_tree_agrees_with_its_definition(
    parents: tuple[int, ...], known: int, computed: int, rule: pa.AttentionRule
) -> None:
    """Some of the draft tokens may have been computed before."""
    generator = torch.Generator().manual_seed(known)
    tokens = [1] * (1 + len(parents))
    first = min(computed, len(parents) - 1)
    start, tokens = (known + first, tokens[1 + first :]) if computed else (known - 1, tokens)
    width = -(-(known + len(parents)) // 4)
    blocks = (torch.randperm(width, generator=generator) + 1).tolist()
    batch = step_inputs([Run(start, tokens, blocks, Tree(parents))], 4, CPU, torch.float32).batch
    keys, values = (
        PagedTensor(torch.randn(width + 1, 4, 2, 8, generator=generator)) for _ in range(2)
    )
    queries = torch.randn(len(tokens), 4, 8, generator=generator)
    got = attend_sdpa(queries, keys, values, batch, rule)
    expected = attend_reference(queries, keys, values, batch, rule)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("stored", ["float32", "int8", "fp8"])
@pytest.mark.parametrize(
    "family",
    ["llama-3.1", "mistral-sliding", "gemma-3", "llama-4", "deepseek-v3", "gpt-2", "stream"],
)
def test_each_draft_token_scores_as_if_its_path_were_alone(
    tmp_path_factory: pytest.TempPathFactory, family: str, stored: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"trees-{family}"
    if not folder.exists():
        save_model(folder, *FAMILIES["llama-2" if family == "stream" else family])
    stream = Window(5, 2) if family == "stream" else None
    checkpoint = open_checkpoint(folder)
    model, _ = open_model(checkpoint, LoadingOptions(CPU, torch.float32, stream=stream))
    prompt = [1, 403, 407, 261, 300, 17, 29, 31, 402]
    blocks = [3, 1, 7, 4, 2, 6]

    def scores(run: Run) -> torch.Tensor:
        """Logits of a run after the computed prompt (all but its last token), in a cache of its own."""
        config = EngineConfig(dtype="float32", kv_cache_dtype=stored)
        dtype = stored_dtype(config, CPU, torch.float32)
        cache = KvCache(model.kv_layouts, 8, 3, CPU, dtype)
        for own in (Run(0, prompt[:-1], blocks), run):
            hidden = model.forward(step_inputs([own], 3, CPU, torch.float32), cache.layers)
        return model.logits(hidden)

    # A GEMM of other shape may differ in its last bit, which on some processors rounds a code the other way.
    atol = 2e-4 if stored == "float32" else 2e-3
    last = len(prompt) - 1
    together = scores(Run(last, [prompt[-1], *DRAFT_TOKENS], blocks, TREE))
    for index in range(len(DRAFT_TOKENS)):
        path = [DRAFT_TOKENS[i] for i in TREE.path(index)]
        alone = scores(Run(last, [prompt[-1], *path], blocks))
        torch.testing.assert_close(together[0], alone[0], atol=atol, rtol=1e-4)
        torch.testing.assert_close(together[1 + index], alone[-1], atol=atol, rtol=1e-4)


class Oracle:
    """Proposer that knows the next tokens and hides them among wrong ones, rarely first in a level."""

    bytes_held = 0
    aux_hidden_state_layers: tuple[int, ...] = ()
    caches: tuple[KvCache, ...] = ()

    def __init__(self, sequences: Sequence[Sequence[int]], width: int) -> None:
        self._sequences = [tuple(one) for one in sequences]
        self._width = width
        self._random = random.Random(5)
        self.num_moved = 0

    def observe(self, steps: Sequence[TargetStates]) -> None:
        for step in steps:
            assert len(step.hidden) == len(step.next_ids)

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        found = {}
        for row in rows:
            history = tuple(row.history)
            rest = [
                one[len(history) :] for one in self._sequences if one[: len(history)] == history
            ]
            if row.num_draft_tokens and rest:
                found[row.sequence_id] = self._hidden(rest[0], row.num_draft_tokens)
        return found

    def _hidden(self, coming: tuple[int, ...], max_draft_tokens: int) -> DraftTokens:
        tokens: list[int] = []
        parents: list[int] = []
        right = -1
        for token in coming[: max_draft_tokens // self._width]:
            level = [(token + 1 + i) % 512 for i in range(self._width)]
            if self._random.random() < 0.8:
                level[self._random.randrange(self._width)] = token
            parents += [right] * self._width
            tokens += level
            if token not in level:
                # A wrong draft token may well have descendants.
                right = len(tokens) - self._width
                continue
            right = len(tokens) - self._width + level.index(token)
            self.num_moved += level.index(token) > 0
        return DraftTokens(tuple(tokens), Tree(tuple(parents)))


PROMPTS = [
    "Once upon a time there was a little girl named Lily. Lily",
    "Once upon a time there was a little girl named Lily. She",
    "One day, Tom",
    "a",
]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, top_p=0.95, max_tokens=32, ignore_eos=True)
FORKED = SamplingParams(
    temperature=0.8, seed=11, n=3, max_tokens=24, logprobs=1, repetition_penalty=1.2, min_tokens=10
)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_medusa(tmp_path_factory.mktemp("heads") / "medusa", heads=4)


def generate(
    params: SamplingParams,
    speculation: SpeculationConfig | None,
    oracle: Oracle | None,
    **options: Any,
) -> tuple[list[list[tuple[int, ...]]], LLM]:
    llm = LLM("stories3M", dtype="float32", num_threads=1, speculation=speculation, **options)
    if oracle is not None:
        llm.engine.runner._speculation.proposer = oracle
    results = llm.generate(PROMPTS, params)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.stats.kv_blocks_used == 0
    return [[tuple(one.token_ids) for one in result.completions] for result in results], llm


@pytest.mark.sweep(6)
@pytest.mark.parametrize("params", [GREEDY, SEEDED, FORKED], ids=["greedy", "seeded", "forked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 3, "max_num_batched_tokens": 12, "max_num_seqs": 6},
        {"enable_prefix_caching": False, "kv_cache_dtype": "fp8"},
        {"block_size": 4, "num_blocks": 24, "kv_cache_dtype": "int8"},
        {"block_size": 4, "window": 12, "attention_sinks": 3},
        {"async_scheduling": True, "block_size": 1, "num_blocks": 110},
    ],
    ids=["plain", "chunks", "fp8", "preempted-int8", "stream", "overlapped-preempted"],
)
def test_the_tokens_are_those_without_speculation(
    heads: Path, params: SamplingParams, options: dict[str, Any]
) -> None:
    expected, plain = generate(params, None, None, **options)
    sequences = [
        [*plain.engine.encode(prompt), *tokens]
        for prompt, found in zip(PROMPTS, expected, strict=True)
        for tokens in found
    ]
    oracle = Oracle(sequences, width=3)
    speculation = SpeculationConfig("medusa", heads, num_tokens=4, tree_width=3)
    found, llm = generate(params, speculation, oracle, **options)
    assert found == expected
    stats = llm.engine.stats
    assert oracle.num_moved > 15 and stats.num_accepted_tokens > 30
    if "max_num_batched_tokens" not in options:  # there draft tokens share the budget with prompts
        assert stats.num_steps < plain.engine.stats.num_steps
    if "num_blocks" in options:
        assert stats.num_preemptions > 0


def test_the_cache_after_a_tree_is_the_cache_without(heads: Path) -> None:
    """Bit-identical codes and scales: accepted draft tokens were compacted into their slots."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for dtype in ("float32", "int8"):
        caches = []
        expected: list[list[tuple[int, ...]]] = []
        for speculation in (None, SpeculationConfig("medusa", heads, num_tokens=4, tree_width=3)):
            llm = LLM(
                "stories3M",
                dtype="float32",
                num_threads=1,
                speculation=speculation,
                kv_cache_dtype=dtype,
            )
            prompt = llm.engine.encode(PROMPTS[0])
            if speculation is not None:
                llm.engine.runner._speculation.proposer = Oracle(
                    [[*prompt, *expected[0][0]]], width=3
                )
            (result,) = llm.generate([prompt], params)
            expected.append([tuple(result.token_ids)])
            layers = llm.engine.runner.cache.layers
            size = llm.engine.runner.cache.block_size
            used = -(-(len(prompt) + 29) // size)  # the first blocks, which only this sequence took
            tokens = len(prompt) + 29
            caches.append(
                [
                    p[1 : used + 1].flatten(0, 1)[:tokens].float()
                    for one in layers
                    for p in one.parts
                ]
            )
        assert expected[0] == expected[1]
        for one, other in zip(*caches, strict=True):
            torch.testing.assert_close(one, other, atol=1.0 if dtype == "int8" else 1e-5, rtol=1e-5)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 100))
def test_trees_expand_within_their_draft_slots(
    max_draft_tokens: int, width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams()
    row = ScheduledRow(
        "s", 0, 1, TokenView([1]), (1,), 1, 1, params, 0, num_draft_tokens=max_draft_tokens
    )
    expansion = TreeExpansion(row, width)
    while expansion.level < expansion.depth:
        scores = torch.randn(len(expansion.frontier), 20, generator=generator) * 3
        expansion.extend(*largest(scores.softmax(-1), width))
        assert len(expansion.frontier) <= width
    draft_tokens = expansion.draft()
    assert len(draft_tokens.token_ids) <= max_draft_tokens
    assert draft_tokens.tree.depth <= -(-max_draft_tokens // width)
    assert len(
        {(p, t) for p, t in zip(draft_tokens.tree.parents, draft_tokens.token_ids, strict=True)}
    ) == len(draft_tokens.token_ids)


def largest(preferences: torch.Tensor, width: int) -> tuple[list[list[float]], list[list[int]]]:
    values, tokens = preferences.topk(width)
    return values.tolist(), tokens.tolist()


def test_an_expanded_tree_has_the_likeliest_draft_tokens() -> None:
    row = ScheduledRow(
        "s", 0, 1, TokenView([1]), (1,), 1, 1, SamplingParams(), 0, num_draft_tokens=4
    )
    expansion = TreeExpansion(row, 2)
    expansion.extend(*largest(torch.tensor([[0.1, 0.6, 0.3, 0.0]]), 2))
    second = torch.tensor([[0.0, 0.0, 0.9, 0.1], [0.5, 0.0, 0.05, 0.45]])
    expansion.extend(*largest(second, 2))
    draft_tokens = expansion.draft()
    # 0.6, 0.3, 0.54 behind the first, 0.15 behind the second.
    assert draft_tokens.token_ids == (1, 2, 2, 0) and draft_tokens.tree.parents == (-1, -1, 0, 1)


def test_preferences_peak_at_the_sampled_token() -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(2)) * 2
    for params in (GREEDY, SEEDED, SamplingParams(temperature=1.3, top_k=5)):
        rows = [SamplingRow(params, seed, [1, 2, 3], 1) for seed in range(40)]
        preferences = Sampler().preferences(logits, rows)
        torch.testing.assert_close(preferences.sum(-1), torch.ones(40))
        assert preferences.argmax(-1).tolist() == Sampler().draw(logits, rows)[0]
