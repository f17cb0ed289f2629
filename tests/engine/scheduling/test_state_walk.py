"""The random walk for a model with constant state: each sequence's state, forks, checkpoints and what restores them."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from ...support.policy_world import World
from .test_scheduler_walk import EXAMPLES, SchedulerWalk


class StateWalk(SchedulerWalk):
    """The walk with state slots, without what the engine refuses beside them: draft tokens and swap space."""

    num_restored: ClassVar[int] = 0
    num_starved: ClassVar[int] = 0
    num_dropped_steps: ClassVar[int] = 0

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        num_states=st.integers(1, 4),
        num_checkpoints=st.sampled_from([0, 1, 3]),
        spare=st.integers(0, 8),
        chunk=st.sampled_from([{}, {"prefill_chunk_size": 1}, {"prefill_chunk_size": 3}]),
        loop=st.sampled_from(["serial", "early", "late"]),
    )
    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, num_blocks, block_size, max_num_seqs, num_states, num_checkpoints, spare, chunk, loop
    ):
        self.world = World(
            num_blocks,
            block_size,
            num_checkpoints > 0,
            loop=loop,
            num_states=num_states,
            num_checkpoints=num_checkpoints,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare,
            **chunk,
        )
        self.expected, self.aborted, self.count = {}, set(), 0

    @precondition(lambda self: hasattr(self, "world") and self.world.loop == "serial")
    @rule()
    def fail_a_step(self):
        self.world.drop_in_flight()
        StateWalk.num_dropped_steps += 1

    @invariant()
    def slots_bound_the_running_sequences(self):
        if hasattr(self, "world"):
            scheduler = self.world.scheduler
            StateWalk.num_starved += bool(scheduler.waiting and not scheduler.states.has_free)

    def teardown(self):
        super().teardown()
        if hasattr(self, "world"):
            StateWalk.num_restored += self.world.num_restored


def test_random_walk_with_states():
    before = SchedulerWalk.num_preemptions, SchedulerWalk.num_forks
    run_state_machine_as_test(
        StateWalk,
        settings=settings(
            max_examples=EXAMPLES // 3, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )
    assert StateWalk.num_restored >= 20
    assert StateWalk.num_starved >= 20
    assert StateWalk.num_dropped_steps >= 20
    assert SchedulerWalk.num_preemptions - before[0] >= 20
    assert SchedulerWalk.num_forks - before[1] >= 20
