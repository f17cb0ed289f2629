"""Images with bidirectional attention are computed whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.scheduling.kv_eviction import KvEviction

from ...support.policy_world import World, num_tokens_of


def add(
    world: World, name: str, num_tokens: int, images: Sequence[range], max_tokens: int = 2
) -> None:
    world.add(name, [1] * num_tokens, max_tokens, images=tuple(images), ignore_eos=True)


def steps(world: World) -> list[dict[str, int]]:
    planned = []
    while world.scheduler.has_unfinished():
        planned.append(num_tokens_of(world.step()[0]))
    return planned


def test_a_chunk_ends_before_an_image_that_it_would_cut():
    world = World(num_blocks=30, max_num_batched_tokens=8)
    add(world, "a", 20, [range(5, 12), range(12, 16)])
    assert steps(world) == [{"a/0": 5}, {"a/0": 7}, {"a/0": 8}, {"a/0": 1}]


def test_a_chunk_that_ends_with_an_image_is_not_shortened():
    world = World(num_blocks=30, max_num_batched_tokens=8)
    add(world, "a", 20, [range(2, 8)])
    assert steps(world)[:2] == [{"a/0": 8}, {"a/0": 8}]


def test_an_image_takes_what_sequences_after_it_would_get():
    world = World(num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4)
    add(world, "a", 11, [range(3, 11)])
    add(world, "bb", 2, [], max_tokens=5)
    assert num_tokens_of(world.step()[0]) == {"a/0": 3, "bb/0": 2}
    assert num_tokens_of(world.step()[0]) == {"a/0": 8}
    assert num_tokens_of(world.step()[0]) == {"a/0": 1, "bb/0": 1}


def test_an_image_waits_for_sequences_before_it():
    world = World(num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4)
    add(world, "a", 2, [], max_tokens=3)
    add(world, "bb", 8, [range(8)])
    assert steps(world)[:4] == [{"a/0": 2}, {"a/0": 1}, {"a/0": 1}, {"bb/0": 8}]


def test_an_image_that_no_step_holds_is_refused():
    world = World(num_blocks=30, max_num_batched_tokens=8)
    with pytest.raises(
        BadInput, match=r"an image of 9 tokens.* the 8 tokens of a step: raise max_num"
    ):
        add(world, "a", 20, [range(5, 14)])
    world = World(num_blocks=30, max_num_batched_tokens=8, prefill_chunk_size=4)
    with pytest.raises(
        BadInput, match=r"an image of 5 tokens.* the 4 tokens of a step.*prefill_chunk"
    ):
        add(world, "a", 20, [range(5, 10)])


def test_images_need_a_cache_without_a_budget():
    eviction = KvEviction("h2o", budget=8, block_size=4)
    world = World(num_blocks=30, eviction=eviction)
    with pytest.raises(BadInput, match="kv_budget"):
        add(world, "a", 20, [range(5, 8)])
