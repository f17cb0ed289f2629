"""A random walk over everything that can happen to a request, with every invariant checked each step."""

from __future__ import annotations

import os
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from llmopt.base.errors import BadInput
from llmopt.engine.scheduling.scheduler_config import POLICIES

from ...support.policy_world import World, foretell

# 300 make more than 3,000 steps; 2,000 make more than 20,000.
EXAMPLES = int(os.environ.get("LLMOPT_WALK_EXAMPLES", "300"))
# Few distinct tokens, so that prompts share prefixes by chance as well as by design.
PROMPTS = st.one_of(
    st.lists(st.integers(1, 2), min_size=1, max_size=14),
    st.integers(1, 14).map(lambda length: [1] * length),
)


class SchedulerWalk(RuleBasedStateMachine):
    """Requests come, fork, are preempted, aborted and finished in an order that hypothesis chooses."""

    num_steps: ClassVar[int] = 0
    num_preemptions: ClassVar[int] = 0
    num_swaps: ClassVar[int] = 0
    num_forks: ClassVar[int] = 0
    num_hit_tokens: ClassVar[int] = 0
    num_dropped_blocks: ClassVar[int] = 0
    num_accepted_drafts: ClassVar[int] = 0
    num_moved_drafts: ClassVar[int] = 0
    num_holds: ClassVar[int] = 0

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        spare=st.integers(0, 8),
        chunk=st.sampled_from([None, 1, 3]),
        caching=st.booleans(),
        window=st.sampled_from([None, None, 1, 3, 9]),
        sinks=st.sampled_from([0, 0, 1, 6]),
        policy=st.sampled_from(list(POLICIES)),
        drafting=st.sampled_from([0, 1, 4]),
        width=st.sampled_from([1, 3]),
        loop=st.sampled_from(["serial", "early", "late"]),
        num_host_blocks=st.sampled_from([0, 0, 2, 5, 20]),
    )
    def build(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        spare,
        chunk,
        caching,
        window,
        sinks,
        policy,
        drafting,
        width,
        loop,
        num_host_blocks,
    ):
        limits = {} if chunk is None else {"prefill_chunk_size": chunk}
        limits |= {} if window is None else {"window": window, "sinks": sinks, "max_model_len": 200}
        self.world = World(
            num_blocks,
            block_size,
            caching,
            policy,
            drafting,
            width,
            loop,
            num_host_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare,
            **limits,
        )
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.count = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        n=st.integers(1, 3),
        priority=st.integers(0, 1),
        salt=st.sampled_from([b"", b"", b"adapter"]),
    )
    def add(self, prompt, max_tokens, n, priority, salt):
        name = f"r{self.count}"
        self.count += 1
        own = priority if self.world.scheduler.config.policy == "priority" else 0
        try:
            request = self.world.add(name, prompt, max_tokens, n=n, priority=own, salt=salt)
        except BadInput:
            return
        SchedulerWalk.num_forks += n - 1
        for index in range(n):
            self.expected[f"{name}/{index}"] = foretell(
                prompt, request.seed + index, max_tokens, salt
            )

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.world.step()
            SchedulerWalk.num_steps += 1
            SchedulerWalk.num_dropped_blocks += sum(
                len(request.evicted) for request in self.world.scheduler.running
            )

    @rule(data=st.data())
    def abort(self, data):
        names = sorted(request.sequence_id for request in self.world.scheduler.requests())
        name = data.draw(st.sampled_from([*names, "nobody/0"]))
        request = self.world.scheduler.abort(name)
        if request is not None:
            # What had not forked yet goes with the sequence that it would have forked from.
            for index in range(request.num_completions):
                self.aborted.add(f"{request.request_id}/{request.index + index}")

    @rule(data=st.data())
    def hold(self, data):
        names = sorted({request.request_id for request in self.world.scheduler.requests()})
        self.world.scheduler.waiting.hold(data.draw(st.sampled_from([*names, "nobody"])))
        SchedulerWalk.num_holds += bool(names)

    @rule(data=st.data())
    def resume(self, data):
        held = sorted(self.world.scheduler.waiting.held_ids)
        self.world.scheduler.waiting.resume(data.draw(st.sampled_from([*held, "nobody"])))

    @rule()
    def reset_prefix_cache(self):
        self.world.scheduler.cache.reset()

    @invariant()
    def holds_together(self):
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for name in [*self.world.scheduler.waiting.held_ids]:
            self.world.scheduler.waiting.resume(name)
        self.world.drain()
        SchedulerWalk.num_hit_tokens += sum(
            request.num_cached_tokens for request in self.world.finished.values()
        )
        SchedulerWalk.num_accepted_drafts += self.world.num_accepted
        SchedulerWalk.num_moved_drafts += self.world.num_moved
        SchedulerWalk.num_preemptions += self.world.scheduler.num_preemptions
        SchedulerWalk.num_swaps += self.world.scheduler.swap.num_swaps
        for name, tokens in self.expected.items():
            if name not in self.aborted:
                request = self.world.finished[name]
                assert request.token_ids[request.num_prompt_tokens :] == tokens


def test_random_walk():
    run_state_machine_as_test(
        SchedulerWalk,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
        ),
    )
    assert SchedulerWalk.num_steps >= 10 * EXAMPLES
    # A walk that never met the hard cases would prove little.
    assert SchedulerWalk.num_preemptions >= 20
    assert SchedulerWalk.num_swaps >= 20
    assert SchedulerWalk.num_forks >= 20
    assert SchedulerWalk.num_hit_tokens >= 20
    assert SchedulerWalk.num_dropped_blocks >= 20
    assert SchedulerWalk.num_accepted_drafts >= 20
    assert SchedulerWalk.num_moved_drafts >= 20
    assert SchedulerWalk.num_holds >= 20
