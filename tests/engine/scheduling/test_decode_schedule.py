"""Decode steps scheduled from the step before, against those that look at every sequence again."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.engine.scheduling.step_plan import DecodeRows, StepPlan

from ...support.policy_world import Loop, World

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}


def traffic(loop: Loop, *, goes_on: bool, num_blocks: int) -> tuple[list[StepPlan], dict[str, Any]]:
    """Plans and results of requests of many lengths, some more than fit; one is aborted, one forks."""
    world = World(num_blocks, 4, loop=loop, **LIMITS)
    world.scheduler._goes_on &= goes_on
    for index, (length, count) in enumerate(((1, 9), (6, 20), (3, 5), (4, 30), (2, 12), (9, 7))):
        world.add(str(index), [1 + index % 3] * length, count, ignore_eos=index % 2 == 0)
    world.add("forks", [2] * 5, 11, n=3, stop_token_ids=(3,))
    plans: list[StepPlan] = []
    while world.scheduler.has_unfinished():
        plans.append(world.step()[0])
        if len(plans) == 9:
            world.scheduler.abort("3/0")
            world.scheduler.check_integrity()
    results = {name: (r.token_ids, r.finish_reason) for name, r in world.finished.items()}
    return plans, results


@pytest.mark.parametrize("loop", ["serial", "early", "late"])
@pytest.mark.parametrize("num_blocks", [14, 60], ids=["preempting", "ample"])
def test_the_plans_are_the_same(loop: Loop, num_blocks: int) -> None:
    plans, results = traffic(loop, goes_on=True, num_blocks=num_blocks)
    others, others_results = traffic(loop, goes_on=False, num_blocks=num_blocks)
    assert results == others_results
    assert [ranges(plan) for plan in plans] == [ranges(plan) for plan in others]
    going_on = [plan for plan in plans if isinstance(plan.rows, DecodeRows) and plan.rows.step]
    assert going_on and not any(isinstance(plan.rows, DecodeRows) for plan in others)


def ranges(plan: StepPlan) -> list[Any]:
    """Of each row what the model needs of it, and what else there is to do."""
    rows = [
        (r.sequence_id, r.start, r.end, len(r.tokens), r.block_ids, r.num_samples)
        for r in plan.rows
    ]
    facts = plan.num_tokens, plan.has_placeholders, plan.blocks_next_step, plan.checkpoints
    return [rows, [*plan.sequence_ids], *facts, plan.copies]


def test_rows_stay_what_they_were_when_their_sequences_went_on() -> None:
    """A plan is read late: by another thread, by a recorder, after a failed step."""
    world = World(30, 4, **LIMITS)
    world.add("a", [1, 2, 1], 20, ignore_eos=True)
    world.add("b", [2, 2], 20, ignore_eos=True)
    first = [world.step()[0] for _ in range(6)]
    read_now = [ranges(plan) for plan in first]
    world = World(30, 4, **LIMITS)
    world.add("a", [1, 2, 1], 20, ignore_eos=True)
    world.add("b", [2, 2], 20, ignore_eos=True)
    plans = [world.step()[0] for _ in range(12)]
    world.scheduler.abort("a/0")
    plans += [world.step()[0] for _ in range(3)]
    assert [ranges(plan) for plan in plans[:6]] == read_now
