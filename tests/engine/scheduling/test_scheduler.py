from __future__ import annotations

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.scheduling.block_pool import CachedBlock, hash_block
from llmopt.engine.scheduling.scheduler_config import POLICIES, TOKENS_PER_PLACE, StepPace

from ...support.policy_world import World, foretell, num_tokens_of


def outputs(world: World) -> dict[str, list[int]]:
    return {
        name: request.token_ids[request.num_prompt_tokens :]
        for name, request in world.finished.items()
    }


def test_a_step_mixes_decodes_with_chunks_of_prompts():
    world = World(num_blocks=20, max_num_batched_tokens=6)
    world.add("a", [1] * 4, 5)
    plan, _ = world.step()
    assert num_tokens_of(plan) == {"a/0": 4}
    world.add("b", [2] * 9, 5)
    plan, _ = world.step()
    assert num_tokens_of(plan) == {"a/0": 1, "b/0": 5}
    plan, _ = world.step()
    assert num_tokens_of(plan) == {"a/0": 1, "b/0": 4}


def test_every_running_sequence_moves_in_every_step():
    """A long prompt ahead must not starve the decodes behind it of the token budget."""
    world = World(num_blocks=40, max_num_batched_tokens=4, max_num_seqs=3)
    world.add("short", [2], 8, ignore_eos=True, priority=1)
    world.step()
    world.add("long", [1] * 20, 3)
    world.step()
    world.scheduler.running.sort(key=lambda request: request.rank)
    plan, _ = world.step()
    assert num_tokens_of(plan) == {"long/0": 3, "short/0": 1}
    world.drain()


def test_chunks_are_cut_to_the_limit():
    world = World(num_blocks=20, prefill_chunk_size=3)
    world.add("a", [1] * 7, 1)
    sizes = [world.step()[0].num_tokens for _ in range(3)]
    assert sizes == [3, 3, 1]


def test_a_request_that_can_never_fit_is_refused_at_once():
    world = World(num_blocks=4, block_size=4, max_model_len=32)
    with pytest.raises(BadInput, match="never fit in the KV cache of 12 tokens"):
        world.add("a", [1] * 10, 4)
    with pytest.raises(BadInput, match="context length of 32"):
        world.add("b", [1] * 30, 4)
    world.add("c", [1] * 10, 3)  # the last token needs no slot
    world.drain()


def test_a_full_prefix_hit_still_computes_a_token():
    world = World(num_blocks=20)
    world.add("a", [1, 2, 3, 4, 5, 6, 1, 2], 2)
    world.drain()
    world.add("b", [1, 2, 3, 4, 5, 6, 1, 2], 2)
    plan, _ = world.step()
    assert plan.rows[0].start == 4, "the second block would leave nothing to compute"
    assert num_tokens_of(plan) == {"b/0": 4}
    world.drain()


def test_prompts_in_the_same_step_do_not_share_what_is_not_computed_yet():
    world = World(num_blocks=20, max_num_batched_tokens=20)
    world.add("a", [1] * 8 + [2], 2)
    world.add("b", [1] * 8 + [3], 2)
    plan, _ = world.step()
    assert [row.start for row in plan.rows] == [0, 0]
    world.drain()


def test_the_salt_keeps_prefixes_apart():
    assert hash_block(b"", [1, 2], b"a") != hash_block(b"", [1, 2], b"b")
    assert hash_block(b"p", [1, 2], b"") != hash_block(b"q", [1, 2], b"")
    long = b"0/" + b"x" * 254
    assert hash_block(b"", [1, 2], long + b"a") != hash_block(b"", [1, 2], long + b"b")


def test_a_hash_collision_is_a_miss():
    world = World(num_blocks=20)
    first = world.add("a", [1] * 8 + [2], 1)
    world.drain()
    cache = world.scheduler.cache
    name = first.block_hashes[0]
    honest = cache._by_hash[name]
    cache._by_hash[name] = CachedBlock(honest.block_id, b"", (9, 9, 9, 9))
    world.add("b", [1] * 8 + [2], 1)
    plan, _ = world.step()
    assert plan.rows[0].start == 0


def test_prompt_logprobs_compute_every_token():
    world = World(num_blocks=20)
    world.add("a", [1] * 9, 1)
    world.drain()
    world.add("b", [1] * 9, 1, prompt_logprobs=1)
    assert world.step()[0].rows[0].start == 0


def test_the_newest_is_preempted_and_keeps_its_rank():
    world = World(num_blocks=7, max_num_seqs=3, max_num_batched_tokens=12)
    first = world.add("a", [1, 1, 1], 12, ignore_eos=True)
    second = world.add("b", [2, 2, 2], 12, ignore_eos=True)
    while not world.scheduler.num_preemptions:
        world.step()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    world.add("c", [3, 3, 3], 12)
    assert world.scheduler.waiting.head is second
    world.drain()


def test_the_prefix_cache_counts_each_prompt_that_it_looks_up_once():
    """vLLM's prefix_cache_queries leaves out preempted requests, and those that look nothing up."""
    world = World(num_blocks=7, max_num_seqs=3, max_num_batched_tokens=12)
    world.add("a", [1] * 5, 12, ignore_eos=True)
    world.add("b", [2] * 5, 12, ignore_eos=True)
    world.drain()
    assert world.scheduler.num_preemptions
    cache = world.scheduler.cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (10, 0)
    world.add("c", [1] * 5, 2, prompt_logprobs=0)
    world.drain()
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (10, 0)


def test_priority_goes_first_and_is_preempted_last():
    world = World(num_blocks=7, max_num_seqs=3, max_num_batched_tokens=12)
    low = world.add("low", [1, 1, 1], 12, priority=1, ignore_eos=True)
    high = world.add("high", [2, 2, 2], 12, priority=0, ignore_eos=True)
    while not world.scheduler.num_preemptions:
        world.step()
    assert low.num_preemptions == 1
    assert high.num_preemptions == 0
    world.drain()


def test_outputs_do_not_change_under_preemption():
    world = World(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=9)
    prompts = {f"r{i}": [i + 1] * (3 + i) for i in range(5)}
    requests = {name: world.add(name, prompt, 14) for name, prompt in prompts.items()}
    seeds = {name: request.seed for name, request in requests.items()}
    world.drain()
    assert world.scheduler.num_preemptions > 0, "the pool was meant to be too small"
    for name, prompt in prompts.items():
        assert outputs(world)[f"{name}/0"] == foretell(prompt, seeds[name], 14)


def test_forks_share_full_blocks_and_copy_the_partial_one():
    world = World(num_blocks=20, max_num_batched_tokens=20)
    world.add("a", [1] * 6, 4, n=3, ignore_eos=True)
    world.step()
    tables = [request.block_ids for request in world.scheduler.running]
    assert len(tables) == 3
    assert len({table[0] for table in tables}) == 1, "the full block is shared"
    assert len({table[1] for table in tables}) == 3, "the partial one is not"
    plan, _ = world.step()
    assert len(plan.copies.within) == 2
    world.drain()
    assert {name: len(tokens) for name, tokens in outputs(world).items()} == {
        "a/0": 4, "a/1": 4, "a/2": 4,
    }  # fmt: skip


def test_a_fork_without_free_blocks_waits_and_gives_the_same_tokens():
    world = World(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=20)
    request = world.add("a", [1] * 6, 5, n=4)
    seed = request.seed
    world.drain()
    for index in range(4):
        assert outputs(world)[f"a/{index}"] == foretell_fork([1] * 6, seed, index, 5)


def foretell_fork(prompt: list[int], seed: int, index: int, max_tokens: int) -> list[int]:
    return foretell(prompt, seed + index, max_tokens)


def test_aborting_frees_at_once_and_stale_ids_are_harmless():
    world = World(num_blocks=20)
    world.add("a", [1] * 6, 5)
    world.add("b", [2] * 6, 5)
    plan = world.scheduler.schedule()
    world.scheduler.abort("a/0")  # while its step is in flight
    sampled = {row.sequence_id: [3] for row in plan.rows if row.num_samples}
    tokens = world.scheduler.update(plan, sampled, frozenset({0}))
    assert [token.request.sequence_id for token in tokens] == []
    world.scheduler.check_integrity()
    assert world.scheduler.abort("a/0") is None
    assert world.scheduler.abort("never-there") is None
    world.scheduler.abort("b/0")
    assert world.scheduler.pool.num_free == world.scheduler.pool.num_usable
    assert not world.scheduler.has_unfinished()


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(BadInput, match="every running sequence needs a token"):
        World(max_num_batched_tokens=2, max_num_seqs=3)
    with pytest.raises(BadInput, match="prefill_chunk_size"):
        World(prefill_chunk_size=0)


def order_of_service(world: World, requests: dict[str, tuple[int, int]]) -> list[str]:
    """Names by when they end, one at a time, of requests with (prompt tokens, priority)."""
    world.add("first", [1], 2, ignore_eos=True)
    world.step()
    for name, (length, priority) in requests.items():
        world.add(name, [2] * length, 1, priority=priority)
    world.drain()
    return [name.removesuffix("/0") for name in world.finished][1:]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["long", "middle", "short"]),
        ("priority", ["short", "long", "middle"]),
        ("shortest-prefill", ["short", "middle", "long"]),
    ],
)
def test_policies_order_the_queue(policy, expected):
    world = World(num_blocks=40, max_num_seqs=1, policy=policy, max_model_len=90)
    own = -1 if policy == "priority" else 0
    lengths = {"long": (80, 0), "middle": (40, 0), "short": (4, own)}
    assert order_of_service(world, lengths) == expected


def test_under_shortest_prefill_a_long_prompt_is_overtaken_by_so_many_and_no_more():
    world = World(num_blocks=40, max_num_seqs=1, policy="shortest-prefill", max_model_len=90)
    short = {f"short{i}": (1, 0) for i in range(20)}
    order = order_of_service(world, {"long": (80, 0), **short})
    assert 0 < order.index("long") <= 80 // TOKENS_PER_PLACE
    assert [name for name in order if name != "long"] == list(short)


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill"])
def test_an_unused_priority_is_refused(policy):
    world = World(num_blocks=20, policy=policy)
    with pytest.raises(BadInput, match=f"priority = 3: the scheduling policy is {policy}"):
        world.add("a", [1], 2, priority=3)
    assert not world.scheduler.has_unfinished()


def test_the_completions_of_a_request_keep_together():
    """Among equal prompts, forks rank just behind their parent under every policy."""
    for policy in POLICIES:
        world = World(num_blocks=40, max_num_seqs=1, policy=policy)
        world.add("many", [1] * 3, 3, n=3, ignore_eos=True)
        world.step()
        world.add("late", [1] * 3, 3, ignore_eos=True)
        world.drain()
        assert list(world.finished) == ["many/0", "many/1", "many/2", "late/0"]


def test_a_token_sampled_for_an_aborted_request_does_not_go_to_its_namesake():
    world = World(num_blocks=20, loop="late")
    world.add("a", [1, 2, 3], 5)
    world.step()
    world.scheduler.abort("a/0")
    again = world.add("a", [2, 2], 5)
    world.drain()
    assert outputs(world)["a/0"] == foretell([2, 2], again.seed, 5)


def test_a_lost_step_costs_no_known_token():
    """In every loop; running sequences are recomputed, and output placeholders are sampled again."""
    for loop in ("serial", "early", "late"):
        world = World(num_blocks=20, loop=loop)
        requests = [world.add(name, [1] * 6, 6) for name in ("a", "b")]
        for _ in range(3):
            world.step()
        world.drop_in_flight()
        world.drain()
        for request in requests:
            expected = foretell([1] * 6, request.seed, 6)
            assert outputs(world)[request.sequence_id] == expected, loop


def test_a_held_request_waits_without_blocks_and_overtakes_nobody():
    world = World(num_blocks=20, max_num_seqs=2)
    world.add("unread", [1] * 6, 12, n=2, ignore_eos=True)
    world.step()
    world.step()
    waiting = world.scheduler.waiting
    waiting.hold("unread")
    world.add("other", [2] * 5, 4, ignore_eos=True)
    for _ in range(8):
        world.step()
    assert world.finished.keys() == {"other/0"}
    assert waiting.num_held == len(world.scheduler.requests()) == 2
    assert world.scheduler.pool.num_free == world.scheduler.pool.num_usable
    waiting.resume("unread")
    world.drain()
    assert {len(tokens) for name, tokens in outputs(world).items() if "unread" in name} == {12}


DECODE_SECONDS, TOKEN_SECONDS, FIXED_SECONDS = 0.01, 0.001, 0.005


@pytest.mark.parametrize("prompt_len", [30, 6000])
@pytest.mark.parametrize("cost_growth", [0.0, 1e-7])
def test_a_prompt_leaves_running_streams_their_pace(prompt_len: int, cost_growth: float) -> None:
    """Gaps of a stream by the tokens of its steps: at most three times the median, whatever comes beside it."""
    world = World(num_blocks=4000, block_size=4, max_num_batched_tokens=2048, max_model_len=8000)
    scheduler = world.scheduler
    pace = scheduler.pace = StepPace(None, 4, 2048)
    world.add("stream", [1] * 4, 2000, ignore_eos=True)
    gaps, chunks = [], []
    for number in range(600):
        if number % 200 == 50:
            world.add(f"prompt{number}", [2] * prompt_len, 1, salt=str(number).encode())
        plan = scheduler.schedule()
        scheduler.update(plan, {row.sequence_id: [1] for row in plan.rows}, frozenset())
        prompts = [row for row in plan.rows if row.num_tokens > 1]
        cost = sum(row.num_tokens * (TOKEN_SECONDS + cost_growth * row.end) for row in prompts)
        gaps.append(DECODE_SECONDS + cost + FIXED_SECONDS * bool(prompts))
        chunks += [row.num_tokens for row in prompts if number]
        pace.note(plan.rows, gaps[-1])
    beside = sorted(gap for gap in gaps[1:] if gap > DECODE_SECONDS)
    assert sum(chunks) >= 1.5 * (prompt_len - 3)
    assert beside[int(0.99 * len(beside))] <= 3 * beside[len(beside) // 2]
    assert beside[-1] <= 2 * 4 * DECODE_SECONDS
    if prompt_len > 30:  # it settles where a step takes the limit: four decode steps
        assert 0.7 * 4 * DECODE_SECONDS <= beside[len(beside) // 2] <= 4.1 * DECODE_SECONDS


def test_a_burst_on_a_fresh_server_is_not_computed_a_block_a_step() -> None:
    """No step decodes alone before the last prompt: the least ones stand for such a step."""
    world = World(num_blocks=4000, block_size=4, max_num_batched_tokens=64, max_model_len=200)
    pace = world.scheduler.pace = StepPace(None, 4, 64)
    for number in range(20):
        world.add(f"prompt{number}", [2] * 60, 100, ignore_eos=True, salt=str(number).encode())
    for _ in range(40):
        plan, _ = world.step()
        prompts = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        pace.note(plan.rows, DECODE_SECONDS + TOKEN_SECONDS * prompts)
    assert pace.num_tokens > 4


def test_seconds_of_a_step_and_a_block_at_least() -> None:
    pace = StepPace(0.05, 4, 64)
    assert (pace.limit_seconds, pace.num_tokens) == (0.05, 4)
    world = World(num_blocks=40, max_num_batched_tokens=64, max_model_len=64)
    world.scheduler.pace = pace
    world.add("stream", [1], 8, ignore_eos=True)
    world.step()
    world.add("long", [2] * 40, 1)
    sizes = []
    for seconds in (0.01, 0.04, 9.0, 9.0):
        plan, _ = world.step()
        sizes.append(num_tokens_of(plan)["long/0"])
        pace.note(plan.rows, seconds)
    assert sizes == [4, 8, 8, 4] and pace.num_tokens == 4
    world.drain()
