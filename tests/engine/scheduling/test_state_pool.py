"""State slots: one owner each, restored from checkpoints at block ends, copied by forks."""

from __future__ import annotations

import pytest
from llmopt.engine.scheduling.request import Request
from llmopt.engine.scheduling.state_pool import StatePool

from ...support.policy_world import World, foretell


def world(**options: int) -> World:
    options = {"num_blocks": 20, "block_size": 4, "num_states": 3, "num_checkpoints": 2, **options}
    return World(**options, max_num_batched_tokens=32)  # pyright: ignore[reportArgumentType]


def test_a_prompt_is_cut_where_its_last_block_ends_so_that_a_checkpoint_can_be_saved():
    made = world()
    made.add("a", list(range(1, 7)) * 2, 2)
    (row,) = made.step()[0].rows
    assert (row.start, row.end, row.state_slot, row.checkpoint) == (0, 8, 1, 4)
    (row,) = made.step()[0].rows
    assert (row.start, row.end, row.checkpoint) == (8, 12, 5)  # 12 tokens end with a block
    made.drain()


def test_a_cached_prefix_goes_on_from_its_checkpoint():
    made = world()
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    made.add("a", prompt, 1)
    made.drain()
    again = made.add("b", prompt, 1)
    plan, _ = made.step()
    assert again.num_cached_tokens == 8
    assert plan.copies.states == ((4, 1),)
    made.drain()


def test_blocks_without_a_checkpoint_are_no_hits():
    made = world(num_checkpoints=0)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    made.add("a", prompt, 1)
    made.drain()
    again = made.add("b", prompt, 1)
    made.drain()
    assert again.num_cached_tokens == 0


def test_the_least_recently_used_checkpoint_is_overwritten():
    made = world()
    prompts = [[token] * 6 for token in (1, 2, 3)]
    for index, prompt in enumerate([prompts[0], prompts[1], prompts[0], prompts[2]]):
        made.add(str(index), prompt, 1)
        made.drain()
    hits = []
    for index, prompt in enumerate([prompts[0], prompts[2], prompts[1]]):
        hits.append(made.add(f"again-{index}", prompt, 1))
        made.drain()
    assert [request.num_cached_tokens for request in hits] == [4, 4, 0]


def test_of_an_output_the_newest_checkpoint_is_kept():
    made = world(num_checkpoints=3)
    prompt = [1, 2, 3, 1, 2]
    made.add("a", prompt, 20, ignore_eos=True)
    made.drain()
    tokens = made.finished["a/0"].token_ids
    reused = []
    for index, length in enumerate([6, 14, 25]):
        reused.append(made.add(f"again-{index}", tokens[:length], 1))
        made.drain()
    # The prompt's first block, nothing between, and the last block whose tokens were computed.
    assert [request.num_cached_tokens for request in reused] == [4, 4, 24]


def test_a_fork_copies_the_state_of_its_parent():
    made = world()
    request = made.add("a", [1, 2, 3], 4, n=3)
    made.step()
    plan, _ = made.step()
    assert plan.copies.states == ((1, 2), (1, 3))
    made.drain()
    for index in range(3):
        tokens = made.finished[f"a/{index}"].token_ids[3:]
        assert tokens == foretell([1, 2, 3], request.seed + index, 4)


def test_a_sequence_without_a_free_slot_waits():
    made = world(num_states=1)
    made.add("a", [1, 2, 3], 3)
    made.add("b", [2, 3, 4], 3)
    plan, _ = made.step()
    assert [row.sequence_id for row in plan.rows] == ["a/0"]
    assert len(made.scheduler.waiting) == 1
    made.drain()


def test_a_failed_step_frees_slots_and_what_it_would_have_saved():
    made = world()
    made.add("a", [1] * 9, 3)
    made.add("b", [2] * 9, 3)
    made.drop_in_flight()
    assert made.scheduler.states.num_free == 3
    made.drain()


@pytest.mark.parametrize("broken", ["a slot with two owners", "a slot that nobody has"])
def test_integrity_notices(broken):
    pool = StatePool(2)
    first, second = (sequence(name) for name in "ab")
    for request in (first, second):
        pool.admit(request, 0, {})
    pool.check_integrity([first, second])
    second.state_slot = first.state_slot if "two" in broken else 0
    with pytest.raises(AssertionError):
        pool.check_integrity([first, second])


def sequence(name: str) -> Request:
    return World().add(name, [1], 1)
