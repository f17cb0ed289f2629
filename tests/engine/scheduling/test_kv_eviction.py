"""KV eviction to a budget, without a model: compaction points, blocks, and a random walk over both methods."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.engine.scheduling.kv_eviction import KvEviction
from llmopt.engine.scheduling.request import RequestStatus

from ...support.policy_world import World, foretell


def rule(method: str, budget: int = 4, block_size: int = 2) -> KvEviction:
    return KvEviction(method, budget, block_size, observation_window=2)


def world(method: str, *, budget: int = 4, **options) -> World:
    return World(
        options.pop("num_blocks", 20),
        2,
        eviction=rule(method, budget),
        max_model_len=options.pop("max_model_len", 60),
        **options,
    )


def test_a_prompt_over_the_budget_is_compacted_and_its_blocks_are_free() -> None:
    here = world("snapkv")
    request = here.add("a", [1] * 7 + [2], max_tokens=9, ignore_eos=True)
    here.step()
    pool = here.scheduler.pool
    assert (request.num_computed_tokens, request.num_slots) == (8, 4)
    assert pool.num_usable - pool.num_free == len(request.block_ids) == 2
    plan, _ = here.step()
    (row,) = plan.rows
    assert plan.compactions[0].num_slots == 8 and (row.start, row.num_evicted) == (8, 4)
    for _ in range(4):
        here.step()
    assert len(request.block_ids) == 5, "snapkv keeps the output"


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_no_copy_of_a_fork_writes_over_what_is_kept(max_tokens: int) -> None:
    here = world("snapkv")
    here.add("a", [1, 2, 3], max_tokens=max_tokens, ignore_eos=True, n=2)
    here.add("b", [1] * 5, max_tokens=4, ignore_eos=True)
    num_copies = num_compactions = 0
    while here.scheduler.has_unfinished():
        plan, _ = here.step()
        kept = {block_id for one in plan.compactions for block_id in one.destination}
        assert not kept & {block_id for copy in plan.copies.within for block_id in copy}
        num_copies, num_compactions = (
            num_copies + len(plan.copies.within),
            num_compactions + len(kept),
        )
    assert num_copies and num_compactions


def test_heavy_hitters_are_bounded_by_the_budget_and_a_block() -> None:
    here = world("h2o")
    request = here.add("a", [1, 2], max_tokens=40, ignore_eos=True)
    most = 0
    while here.scheduler.has_unfinished():
        here.step()
        most = max(most, len(request.block_ids))
    assert most == 3 and request.num_output_tokens == 40
    assert here.scheduler.compactor.num_evicted_tokens == 36


def test_a_budget_of_the_whole_sequence_evicts_nothing() -> None:
    for method in ("snapkv", "h2o"):
        here = world(method, budget=12)
        request = here.add("a", [1] * 6, max_tokens=7, ignore_eos=True)
        plan, _ = here.step()
        assert [(row.num_scored, row.compacts) for row in plan.rows] == [(0, False)]
        here.drain()
        assert request.num_evicted_tokens == 0


def test_a_prompt_stays_in_the_prefix_cache_when_it_is_compacted() -> None:
    here = world("snapkv")
    prompt = [1, 2, 3, 4, 5, 6, 1, 3, 2]
    for name in "ab":
        here.add(name, prompt, max_tokens=6, ignore_eos=True)
        here.drain()
    # Hits end before the observation window, the last 2 of 9 tokens: its queries have to vote.
    assert here.finished["b/0"].num_cached_tokens == 6
    assert here.finished["a/0"].token_ids[9:] == foretell(prompt, 0, 6, ignore_eos=True)


def test_what_is_left_of_a_compacted_sequence_is_never_shared() -> None:
    here = world("snapkv")
    first = here.add("a", [1, 2, 3, 4, 5, 6], max_tokens=8, ignore_eos=True)
    while first.num_output_tokens < 7:
        here.step()
    longer = here.add("b", first.token_ids[:], max_tokens=2, ignore_eos=True)
    here.drain()
    assert longer.num_cached_tokens == 6, "of the first one, its prompt alone is known"


def test_a_sequence_longer_than_the_cache_runs_under_h2o_and_is_refused_without() -> None:
    here = world("h2o", num_blocks=5)
    here.add("a", [1] * 8, max_tokens=30, ignore_eos=True)
    here.drain()
    assert len(here.finished["a/0"].token_ids) == 38
    with pytest.raises(BadInput, match="can never fit in the KV cache of 8 tokens"):
        here.add("b", [1] * 9, max_tokens=1)
    snapkv = world("snapkv", num_blocks=5)
    snapkv.add("a", [1] * 8, max_tokens=5, ignore_eos=True)
    snapkv.drain()
    with pytest.raises(BadInput, match="can never fit"):
        snapkv.add("b", [1] * 8, max_tokens=6)


def test_a_sequence_that_finds_no_block_to_be_compacted_to_is_preempted() -> None:
    here = world("h2o", budget=4, num_blocks=7, max_num_batched_tokens=40)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    here.add("a", prompt, max_tokens=12, n=3, ignore_eos=True)
    here.drain()
    for index in range(3):
        got = here.finished[f"a/{index}"].token_ids[8:]
        assert got == foretell(prompt, index, 12, ignore_eos=True)
    assert here.scheduler.num_preemptions > 0


def test_of_two_that_share_a_prompt_the_first_in_rank_is_compacted() -> None:
    here = World(
        *(6, 3, True),
        loop="early",
        eviction=rule("snapkv", block_size=3),
        max_model_len=60,
        max_num_seqs=3,
        max_num_batched_tokens=3,
        prefill_chunk_size=1,
    )
    prompt = [1, 1, 1, 2, 1, 2, 1, 2, 1, 1, 1]
    first, second = [here.add(name, prompt, max_tokens=2) for name in "ab"]
    here.drain(limit=100)
    for request in (first, second):
        assert request.token_ids[11:] == foretell(prompt, request.seed, 2)
    assert first.num_preemptions == 0 < second.num_preemptions


@pytest.mark.parametrize(
    ("method", "budget", "size", "line"),
    [
        ("h2o", 15, 16, "below a block of 16 tokens"),
        ("snapkv", 32, 16, "observation window of the last 32 tokens, so it needs 33"),
    ],
)
def test_a_budget_below_a_block_is_refused(method, budget, size, line) -> None:
    with pytest.raises(BadInput, match=line):
        KvEviction(method, budget, size)


@settings(max_examples=150, deadline=None)
@given(
    method=st.sampled_from(["snapkv", "h2o"]),
    block_size=st.integers(1, 4),
    over=st.integers(0, 5),
    num_blocks=st.integers(6, 20),
    chunk=st.sampled_from([None, 1, 3]),
    caching=st.booleans(),
    loop=st.sampled_from(["serial", "early", "late"]),
    data=st.data(),
)
def test_any_mix_of_requests_gives_what_it_would_alone(
    method, block_size, over, num_blocks, chunk, caching, loop, data
) -> None:
    eviction = KvEviction(method, max(3, block_size) + over, block_size, observation_window=2)
    limits = {} if chunk is None else {"prefill_chunk_size": chunk}
    here = World(
        num_blocks,
        block_size,
        caching,
        loop=loop,
        eviction=eviction,
        max_model_len=60,
        max_num_seqs=3,
        max_num_batched_tokens=data.draw(st.integers(3, 12)),
        **limits,
    )
    expected = {}
    prompts = st.lists(st.integers(1, 2), min_size=1, max_size=16)
    for number in range(data.draw(st.integers(1, 5))):
        prompt, count = data.draw(prompts), data.draw(st.integers(1, 3))
        max_tokens = data.draw(st.integers(1, 14))
        try:
            request = here.add(f"r{number}", prompt, max_tokens, n=count)
        except BadInput:
            continue
        for index in range(count):
            name = f"r{number}/{index}"
            expected[name] = foretell(prompt, request.seed + index, max_tokens)
        for _ in range(data.draw(st.integers(0, 5))):
            here.step()
        event = data.draw(st.sampled_from(["", "", "", "abort", "fail"]))
        if event == "abort" and f"r{number}/0" in expected and here.scheduler.abort(f"r{number}/0"):
            for index in range(count):
                expected.pop(f"r{number}/{index}")
        elif event == "fail":
            here.drop_in_flight()
    here.drain()
    for name, tokens in expected.items():
        done = here.finished[name]
        assert done.token_ids[done.num_prompt_tokens :] == tokens
        assert done.status is RequestStatus.FINISHED
