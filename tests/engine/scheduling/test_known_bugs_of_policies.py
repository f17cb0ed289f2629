"""Regressions of other engines in schedulers, allocators and prefix caches, each tested here.

A test's name begins with the project and the number of its issue.
"""

from __future__ import annotations

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.scheduling.block_pool import hash_block
from llmopt.engine.scheduling.request import RequestStatus

from ...support.policy_world import Loop, World, foretell

LOOPS: tuple[Loop, ...] = ("serial", "early", "late")
everywhere = pytest.mark.parametrize("loop", LOOPS)


def answer(world: World, name: str) -> list[int]:
    request = world.finished[name]
    return request.token_ids[request.num_prompt_tokens :]


def fill(world: World, count: int, length: int = 6, max_tokens: int = 8) -> dict[str, list[int]]:
    """Requests with distinct prompts, and the tokens expected of each."""
    expected = {}
    for index in range(count):
        prompt = [1 + (index + i) % 3 for i in range(length)]
        request = world.add(f"r{index}", prompt, max_tokens, ignore_eos=True)
        expected[request.sequence_id] = foretell(prompt, request.seed, max_tokens, ignore_eos=True)
    return expected


def test_vllm_35541_a_request_larger_than_the_whole_pool_is_refused_when_it_comes():
    world = World(num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(BadInput, match="can never fit"):
        world.add("a", [1] * 12, 2)
    assert not world.scheduler.has_unfinished()


def test_vllm_25538_a_long_prompt_is_not_preempted_and_resumed_step_after_step():
    """It is admitted when all of it fits, so its own next chunk never throws it out."""
    world = World(num_blocks=9, block_size=4, prefill_chunk_size=3, max_num_seqs=4)
    expected = fill(world, 4, length=14, max_tokens=4)
    world.drain()
    assert {name: answer(world, name) for name in expected} == expected
    assert world.scheduler.num_preemptions <= 4


@everywhere
def test_vllm_45388_the_head_of_the_queue_is_admitted_although_others_would_fit(loop):
    """Nothing runs, much waits, and the first needs all: it is served, and then the others are."""
    world = World(num_blocks=7, block_size=4, max_num_seqs=4, loop=loop)
    small = fill(world, 3, length=3, max_tokens=3)
    world.step()
    large = world.add("large", [2] * 20, 4, priority=-1)
    more = world.add("more", [3], 2)
    world.drain()
    assert answer(world, "large/0") == foretell([2] * 20, large.seed, 4)
    assert answer(world, "more/0") == foretell([3], more.seed, 2)
    assert {name: answer(world, name) for name in small} == small


@everywhere
def test_vllm_ascend_16315_a_preemption_frees_its_blocks_at_once_and_no_second_follows(loop):
    """Two blocks a sequence, none spare: the third block of the first costs the last one, and it alone."""
    world = World(num_blocks=7, block_size=4, max_num_seqs=3, max_num_batched_tokens=32, loop=loop)
    for index in range(3):
        world.add(f"r{index}", [1 + index] * 6, 8, ignore_eos=True)
    while not world.scheduler.num_preemptions:
        world.step()
    assert world.scheduler.num_preemptions == 1
    statuses = [r.status for r in sorted(world.scheduler.requests(), key=lambda r: r.order)]
    assert statuses == [RequestStatus.RUNNING, RequestStatus.RUNNING, RequestStatus.WAITING]


@everywhere
def test_vllm_41951_a_preempted_request_keeps_its_rank_in_the_queue(loop):
    world = World(num_blocks=6, block_size=4, max_num_seqs=2, policy="fcfs", loop=loop)
    world.add("first", [1] * 6, 12, ignore_eos=True)
    second = world.add("second", [2] * 6, 12, ignore_eos=True)
    while not second.num_preemptions:
        world.step()
    third = world.add("third", [3] * 2, 2)
    while second.status is RequestStatus.WAITING:
        assert third.status is RequestStatus.WAITING
        world.step()
    world.drain()


@everywhere
def test_vllm_9342_priorities_with_preemption(loop):
    world = World(num_blocks=6, block_size=4, max_num_seqs=3, loop=loop)
    expected = {}
    for index in range(6):
        request = world.add(f"r{index}", [1 + index % 3] * 5, 7, priority=5 - index)
        expected[request.sequence_id] = foretell([1 + index % 3] * 5, request.seed, 7)
        world.step()
    world.drain()
    assert world.scheduler.num_preemptions
    assert {name: answer(world, name) for name in expected} == expected


@everywhere
def test_vllm_15996_under_pressure_no_schedule_stays_empty(loop):
    """`drain` fails on the first step that does nothing."""
    world = World(num_blocks=5, block_size=2, max_num_seqs=8, max_num_batched_tokens=16, loop=loop)
    expected = fill(world, 8, length=3, max_tokens=4)
    world.drain()
    assert {name: answer(world, name) for name in expected} == expected


@pytest.mark.parametrize("loop", ["early", "late"])
def test_vllm_57562_and_28787_output_placeholders_with_chunks_and_preemption(loop):
    """No output placeholder is counted twice, and none is left in an output."""
    world = World(num_blocks=7, block_size=2, prefill_chunk_size=1, max_num_seqs=3, loop=loop)
    expected = fill(world, 6, length=4, max_tokens=6)
    while world.scheduler.has_unfinished():
        world.step()
        for request in world.scheduler.requests():
            assert 0 <= request.num_output_placeholders <= 2
            assert request.num_known_tokens >= request.num_prompt_tokens
            assert request.token_ids[request.num_prompt_tokens :].count(-1) == 0
    assert world.scheduler.num_preemptions
    assert {name: answer(world, name) for name in expected} == expected


@everywhere
def test_vllm_42157_and_6586_an_abort_between_a_step_and_its_tokens(loop):
    world = World(num_blocks=20, loop=loop)
    expected = fill(world, 3)
    world.step()
    world.step()
    world.scheduler.abort("r1/0")
    world.drain()
    assert answer(world, "r0/0") == expected["r0/0"]
    assert answer(world, "r2/0") == expected["r2/0"]
    assert "r1/0" not in world.finished


@everywhere
def test_vllm_25067_an_abort_after_the_end_or_of_an_unknown_id_changes_nothing(loop):
    world = World(num_blocks=20, loop=loop)
    fill(world, 1)
    world.drain()
    assert world.scheduler.abort("r0/0") is None
    assert world.scheduler.abort("nobody/0") is None
    world.scheduler.check_integrity()


@everywhere
@pytest.mark.parametrize("steps", range(5))
def test_rapid_mlx_1759_an_aborted_request_leaves_no_block_behind(loop, steps):
    world = World(num_blocks=12, prefill_chunk_size=2, loop=loop)
    for _ in range(3):
        fill(world, 3)
        for _ in range(steps):
            world.step()
        for request in list(world.scheduler.requests()):
            world.scheduler.abort(request.sequence_id)
        pool = world.scheduler.pool
        assert pool.num_free == pool.num_usable


@everywhere
@pytest.mark.parametrize("length", [4, 8, 12])
def test_nano_vllm_144_and_vllm_11186_a_hit_on_the_whole_prompt_leaves_a_token_to_compute(
    loop, length
):
    """And the chain of hashes goes on behind it: a longer prompt hits what the second one added."""
    world = World(num_blocks=30, block_size=4, loop=loop)
    prompt = [2] * length
    for name in ("first", "again"):
        request = world.add(name, prompt, 9, ignore_eos=True)
        world.drain()
        assert len(answer(world, f"{name}/0")) == 9
    assert request.num_cached_tokens == length - 4
    longer = world.add("longer", request.token_ids[: length + 5], 2)
    world.drain()
    assert longer.num_cached_tokens == (length + 5) // 4 * 4


def test_vllm_49449_a_rewritten_history_hits_only_what_is_the_same():
    world = World(num_blocks=40, block_size=4)
    world.add("turn", [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], 3)
    world.drain()
    changed = world.add("turn2", [1, 2, 3, 1, 2, 9, 1, 2, 3, 1, 2, 3, 1], 3)
    world.drain()
    assert changed.num_cached_tokens == 4
    assert answer(world, "turn2/0") == foretell(
        changed.token_ids[: changed.num_prompt_tokens], changed.seed, 3
    )


@everywhere
def test_vllm_37076_a_block_that_is_evicted_is_not_read_by_its_last_reader(loop):
    """The fake cache records the contents of every slot, and every read checks them."""
    world = World(num_blocks=7, block_size=2, max_num_seqs=2, loop=loop)
    for round_ in range(6):
        expected = fill(world, 4, length=4 + round_ % 3, max_tokens=4)
        world.drain()
        assert {name: answer(world, name) for name in expected} == expected


def test_vllm_5188_a_partial_block_is_not_shared():
    world = World(num_blocks=30, block_size=4)
    world.add("a", [1] * 6, 1)
    world.drain()
    other = world.add("b", [1] * 6 + [2] * 6, 2)
    world.drain()
    assert other.num_cached_tokens == 4


def test_sglang_12224_blocks_are_freed_once():
    world = World(num_blocks=20)
    fill(world, 2)
    world.step()
    request = next(iter(world.scheduler.requests()))
    world.scheduler.finish(request, "stop", "text")
    world.scheduler.finish(request, "stop", "text")
    assert world.scheduler.abort(request.sequence_id) is None
    world.drain()


@everywhere
def test_mini_sglang_43_blocks_that_several_hold_outlive_all_but_the_last(loop):
    world = World(num_blocks=30, block_size=4, max_num_seqs=4, loop=loop)
    parent = world.add("n", [1] * 10, 6, n=4, ignore_eos=True)
    while len(world.scheduler.running) < 4:
        world.step()
    shared = parent.block_ids[:2]
    for gone in ("n/0", "n/2", "n/1"):
        assert all(world.scheduler.pool.ref_count(block) for block in shared)
        world.scheduler.abort(gone)
    world.drain()
    assert answer(world, "n/3") == foretell([1] * 10, parent.seed + 3, 6, ignore_eos=True)


@everywhere
def test_minivllm_98_a_block_is_shared_only_once_it_has_been_computed(loop):
    """Two equal prompts in one step: the second has no hit, and both give the tokens of a run alone."""
    world = World(num_blocks=30, block_size=2, max_num_batched_tokens=20, loop=loop)
    first, second = (world.add(name, [1] * 8, 3) for name in ("a", "b"))
    world.drain()
    assert second.num_cached_tokens == 0
    assert answer(world, "a/0") == foretell([1] * 8, first.seed, 3)
    assert answer(world, "b/0") == foretell([1] * 8, second.seed, 3)


def test_cve_2025_25183_names_of_blocks_cannot_be_foretold_and_salts_keep_them_apart():
    names = {hash_block(parent, [1, 2], salt) for parent in (b"", b"x") for salt in (b"", b"t")}
    assert len(names) == 4 and all(len(name) == 16 for name in names)
    world = World(num_blocks=30, block_size=4)
    for name, salt in (("ours", b""), ("theirs", b"tenant")):
        request = world.add(name, [1] * 9, 2, salt=salt)
        world.drain()
        assert request.num_cached_tokens == 0
