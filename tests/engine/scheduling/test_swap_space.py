"""Swapping of preempted sequences to the host and back: the policy, the copies, the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.cache.kv_cache import KvCache, stored_dtype
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.layers.spec import KvLayout
from llmopt.engine.scheduling.block_pool import NULL_BLOCK
from llmopt.engine.scheduling.step_plan import BlockCopies, StepPlan

from ...support.policy_world import World, foretell
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda
from ...support.pretended_cuda.tensors import Dispatch

PROMPTS = {"a": [1] * 9, "b": [2] * 9, "c": [3] * 9}
MAX_TOKENS = 12


def crowded(num_host_blocks: int, **options: Any) -> World:
    """Three sequences that will need 15 blocks of 4, where there are 10."""
    world = World(11, num_host_blocks=num_host_blocks, max_num_batched_tokens=40, **options)
    for name, prompt in PROMPTS.items():
        world.add(name, prompt, MAX_TOKENS, ignore_eos=True)
    return world


def run(world: World) -> list[StepPlan]:
    """Every plan until nothing is left; the tokens are the expected ones."""
    plans = []
    while world.scheduler.has_unfinished():
        plans.append(world.step()[0])
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        if f"{name}/0" in world.finished:
            own = world.finished[f"{name}/0"].token_ids[len(prompt) :]
            assert own == foretell(prompt, 100 * index, MAX_TOKENS, ignore_eos=True)
    world.drain()
    return plans


def until_swapped(world: World) -> str:
    """Step until a sequence is swapped out; returns its name."""
    swap = world.scheduler.swap
    while len(swap.free_ids) == swap.num_blocks:
        world.step()
    (name,) = (r.sequence_id for r in world.scheduler.requests() if swap.swapped(r) is not None)
    return name


@pytest.mark.parametrize("loop", ["serial", "early", "late"])
@pytest.mark.parametrize("caching", [True, False])
def test_what_was_computed_is_not_computed_again(loop, caching):
    needed = sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS.values())
    without, kept = crowded(0, loop=loop, caching=caching), crowded(20, loop=loop, caching=caching)
    assert sum(plan.num_tokens for plan in run(without)) > needed
    assert sum(plan.num_tokens for plan in run(kept)) == needed
    assert kept.scheduler.num_preemptions == kept.scheduler.swap.num_swaps > 0
    assert without.scheduler.swap.num_swaps == 0


def test_without_free_host_blocks_it_is_recomputed():
    world = crowded(2)
    run(world)
    assert world.scheduler.num_preemptions > world.scheduler.swap.num_swaps == 0


def alone(**options: Any) -> tuple[World, StepPlan]:
    """A sequence of 9 + 8 tokens, of which 16 are computed, that is preempted as the only one; and
    the plan that resumes it."""
    world = World(11, num_host_blocks=20, max_num_batched_tokens=40, **options)
    world.add("a", PROMPTS["a"], MAX_TOKENS, ignore_eos=True)
    for _ in range(8):
        world.step()
    (request,) = world.scheduler.running
    assert request.num_computed_tokens == 16
    world.scheduler._preempt(request)
    plan, _ = world.step()
    assert plan.num_tokens == 1
    run(world)
    return world, plan


def test_what_still_lies_on_the_device_is_shared_and_not_copied_back():
    plan = alone(caching=False)[1]
    assert (len(plan.copies.to_host), len(plan.copies.from_host)) == (4, 4)
    plan = alone(caching=True)[1]
    assert (len(plan.copies.to_host), len(plan.copies.from_host)) == (4, 0)


def test_blocks_behind_a_window_are_not_copied():
    plan = alone(caching=False, window=6, max_model_len=32)[1]
    assert (len(plan.copies.to_host), len(plan.copies.from_host)) == (2, 2)
    assert plan.rows[0].block_ids[:2] == (NULL_BLOCK,) * 2
    with_sinks = alone(caching=False, window=6, sinks=1, max_model_len=32)[1]
    assert len(with_sinks.copies.to_host) == 3


@pytest.mark.parametrize("how", ["abort", "finish", "lost step"])
def test_host_blocks_are_freed_when_a_swapped_sequence_ends(how):
    world = crowded(20)
    scheduler, name = world.scheduler, until_swapped(world)
    (request,) = (r for r in scheduler.requests() if r.sequence_id == name)
    if how == "abort":
        scheduler.abort(name)
    elif how == "finish":
        scheduler.finish(request, "stop")
    else:
        world.drop_in_flight()
    scheduler.check_integrity()
    assert len(scheduler.swap.free_ids) == scheduler.swap.num_blocks
    run(world)


def test_a_request_that_ends_before_the_copy_leaves_no_copy():
    world = crowded(20)
    scheduler = world.scheduler
    world.step()
    (request, *_) = scheduler.running
    scheduler._preempt(request)
    assert len(scheduler.swap.free_ids) < 20
    scheduler.abort(request.sequence_id)
    assert not scheduler.swap.complete(StepPlan(())).copies
    scheduler.check_integrity()
    run(world)


@pytest.mark.parametrize("name", ["bfloat16", "float32", "int8", "fp8"])
@pytest.mark.parametrize("in_keys", [False, True])
def test_a_block_comes_back_as_it_went(name, in_keys):
    layouts = [KvLayout(2, 8, 4 if in_keys else 8, in_keys)] * 3
    config = EngineConfig(dtype="float32", kv_cache_dtype=name)
    dtype = stored_dtype(config, torch.device("cpu"), torch.float32)
    cache = KvCache(layouts, 5, 4, torch.device("cpu"), dtype, num_host_blocks=3)
    parts = [part for layer in cache.layers for part in layer.parts]
    for part in parts:
        part.copy_(torch.randint(1, 100, part.shape).to(part.dtype))
    before = [part.clone() for part in parts]
    cache.copy(BlockCopies(within=((1, 2),), to_host=((2, 0), (3, 2)), from_host=((2, 2), (0, 3))))
    for part, old in zip(parts, before, strict=True):
        expected = old[
            [0, 1, 3, 1, 4]
        ]  # 1 went over 2 and by the host to 3, and 3 by the host to 2
        assert torch.equal(part, expected)


def test_swap_space_is_pinned_as_one_piece_and_unpinned() -> None:
    """torch's allocator would round each part of each layer up to a power of two: twice the memory."""
    layouts, device = [KvLayout(3, 24, 24)] * 5, torch.device("cuda:0")
    with pretended_cuda(Card()):
        cache = KvCache(layouts, 5, 4, device, torch.bfloat16, num_host_blocks=1000)
        exact = 1000 * 5 * 2 * (4 * 3 * 24 * 2)
        assert [*Dispatch.pinned.registered.values()] == [exact]
        cache.copy(BlockCopies(to_host=((2, 999),), from_host=((999, 3),)))
        del cache
        assert not Dispatch.pinned.registered


MODES: dict[str, dict[str, Any]] = {
    "serial": {},
    "overlapped": {"async_scheduling": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"prefill_chunk_size": 5, "async_scheduling": True},
    "fp8": {"kv_cache_dtype": "fp8"},
    "prompt lookup": {"speculation": SpeculationConfig("ngram", ngram_min=1)},
    "draft model": {"speculation": SpeculationConfig("draft", "stories260K")},
    "window": {"window": 16, "attention_sinks": 4, "num_blocks": 18},
}


def answers(**options: Any) -> tuple[list[list[int]], Engine]:
    """Greedy tokens of six requests, and the engine that sampled them."""
    own = {"block_size": 4, "num_blocks": 40, **options}
    built = Engine(EngineConfig("stories3M", dtype="float32", num_threads=1, **own))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in range(6)]
    for index in range(6):
        prompt = [1, *(300 + (7 * index + 3 * place) % 200 for place in range(10 + index))]
        built.add_request(str(index), prompt, params)
    while built.has_unfinished():
        for output in built.step():
            tokens[int(output.request_id)] += output.new_token_ids
        built.scheduler.check_integrity()
    built.close()
    return tokens, built


@pytest.mark.parametrize("mode", MODES)
def test_tokens_do_not_depend_on_where_a_sequence_waited(mode):
    plain, without = answers(**MODES[mode])
    swapped, kept = answers(swap_space_bytes=2**22, **MODES[mode])
    assert swapped == plain
    stats = kept.stats
    assert stats.num_swaps == stats.num_preemptions > 0
    assert without.stats.num_swaps == 0
    assert stats.num_computed_tokens < without.stats.num_computed_tokens
    assert len(kept.scheduler.swap.free_ids) == kept.scheduler.swap.num_blocks


def test_the_space_is_in_blocks_of_all_layers():
    block_bytes = 4 * answers()[1].memory.kv_bytes_per_token
    _, built = answers(swap_space_bytes=3 * block_bytes + 1)
    assert built.scheduler.swap.num_blocks == built.runner.cache.num_host_blocks == 3


@pytest.mark.parametrize(
    ("num_bytes", "line"),
    [(-1, "need 0 or more"), (100, "does not hold one block"), (2**60, "of memory free")],
)
def test_a_space_that_is_none_is_refused(num_bytes, line):
    with pytest.raises(BadInput, match=line):
        answers(swap_space_bytes=num_bytes)
