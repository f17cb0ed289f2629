"""Prompt passes: how prompts share steps, and that every block comes back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.prompt_pass import PromptPass, Span, plan_steps
from llmopt.engine.scheduling.block_pool import Window
from llmopt.engine.scheduling.state_pool import StatePool


class Pass:
    """What a plan needs of a prompt pass."""

    def __init__(
        self,
        max_tokens: int,
        num_free_blocks: int = 99,
        chunk: int | None = None,
        max_prompts: int = 99,
        shared_block: int = 4,
    ) -> None:
        self.max_tokens, self.num_free_blocks = max_tokens, num_free_blocks
        self.max_prompts, self.shared_block = max_prompts, shared_block
        self.chunk = chunk or max_tokens

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // 4)


def planned(
    lengths: list[int], *passes: Any, shared: Sequence[int] = ()
) -> list[list[tuple[int, int, int]]]:
    return [[span[:3] for span in step] for step in plan_steps(lengths, passes, shared)]


def test_prompts_fill_steps_in_order() -> None:
    assert planned([3, 9, 2], Pass(8)) == [[(0, 0, 3), (1, 0, 5)], [(1, 5, 9), (2, 0, 2)]]
    assert planned([8, 8], Pass(8)) == [[(0, 0, 8)], [(1, 0, 8)]]


def test_a_step_is_as_small_as_the_smallest_budget() -> None:
    assert planned([10], Pass(8), Pass(6)) == [[(0, 0, 6)], [(0, 6, 10)]]
    assert planned([5, 2], Pass(8, chunk=4)) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 2)]]


def test_a_prompt_waits_for_a_free_state_slot() -> None:
    steps = planned([3, 3, 3, 9], Pass(8, max_prompts=2))
    assert steps == [[(0, 0, 3), (1, 0, 3)], [(2, 0, 3), (3, 0, 5)], [(3, 5, 9)]]


def test_a_prompt_waits_for_free_blocks() -> None:
    # Five blocks: 8 and 9 tokens fit together, and 12 beside nothing but 8.
    assert planned([8, 9, 12], Pass(100, 5)) == [[(0, 0, 8), (1, 0, 9)], [(2, 0, 12)]]
    # The second prompt still holds its blocks when the third would begin.
    assert planned([8, 16, 12], Pass(16, 6)) == [
        [(0, 0, 8), (1, 0, 8)],
        [(1, 8, 16)],
        [(2, 0, 12)],
    ]


def test_whole_blocks_of_a_shared_beginning_are_not_planned_again() -> None:
    assert planned([9, 9, 7], Pass(100), shared=[0, 7, 3]) == [[(0, 0, 9), (1, 4, 9), (2, 0, 7)]]
    assert planned([8, 9], Pass(100), Pass(100, shared_block=8), shared=[0, 7]) == [
        [(0, 0, 8), (1, 0, 9)]
    ]
    assert planned([8, 9], Pass(100), Pass(100, shared_block=0), shared=[0, 7]) == [
        [(0, 0, 8), (1, 0, 9)]
    ]


def test_a_prompt_needs_free_blocks_for_what_it_does_not_share() -> None:
    """Three blocks and one; the third prompt has room in the next step alone, where it holds all of its own."""
    passes: Any = [Pass(100, 4)]
    steps = list(plan_steps([12, 11, 12], passes, [0, 8, 10]))
    assert steps == [
        [Span(0, 0, 12), Span(1, 8, 11, is_kept=True)],
        [Span(2, 8, 12)],
    ]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        EngineConfig(
            "stories3M",
            dtype="float32",
            block_size=4,
            num_blocks=40,
            max_num_batched_tokens=24,
            num_threads=1,
        )
    )


def test_shared_steps_compute_what_single_prompts_do(engine: Engine) -> None:
    prompts = [list(range(3, 3 + length)) for length in (5, 50, 1, 30)]
    expected = [engine.hidden_states(prompt) for prompt in prompts]
    got: dict[int, list[torch.Tensor]] = {}
    with engine.prompt_pass() as passes:
        for step in plan_steps([len(prompt) for prompt in prompts], [passes]):
            hidden = passes.hidden(step, prompts)
            parts = hidden.split([end - begin for _, begin, end, _ in step])
            for (prompt, *_), part in zip(step, parts, strict=True):
                got.setdefault(prompt, []).append(part)
    for index, states in enumerate(expected):
        torch.testing.assert_close(torch.cat(got[index]), states, atol=1e-4, rtol=1e-4)
    engine.scheduler.pool.check_integrity([])


def num_shared(before: Sequence[int], prompt: Sequence[int]) -> int:
    pairs = zip(before, prompt[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_random_prompts_that_share_beginnings_compute_what_single_ones_do(engine: Engine) -> None:
    """Trees of prompts, walked in order: within a step, across steps, and with little room for blocks."""
    rng = random.Random(0)
    for num_free in (40, 16, 12):
        prompts = [[3]]
        for _ in range(25):
            kept = prompts[-1][: rng.randint(0, len(prompts[-1]))]
            new = [rng.randint(3, 400) for _ in range(rng.randint(1, 20))]
            prompts.append([*kept, *new][:40])
        shared = [0, *(num_shared(*pair) for pair in pairwise(prompts))]
        expected = [engine.hidden_states(prompt) for prompt in prompts]
        taken = engine.scheduler.pool.allocate(engine.scheduler.pool.num_free - num_free)
        computed = 0
        with engine.prompt_pass() as passes:
            for step in plan_steps([len(prompt) for prompt in prompts], [passes], shared):
                hidden = passes.hidden(step, prompts)
                computed += len(hidden)
                parts = hidden.split([end - begin for _, begin, end, _ in step])
                for (prompt, begin, end, _), part in zip(step, parts, strict=True):
                    alone = expected[prompt][begin:end]
                    torch.testing.assert_close(part, alone, atol=1e-4, rtol=1e-4)
        engine.scheduler.pool.free(taken)
        engine.scheduler.pool.check_integrity([])
        assert computed < sum(map(len, prompts)) - 100


def test_nothing_is_shared_behind_a_window_or_a_state(engine: Engine) -> None:
    runner, scheduler = engine.runner, engine.scheduler
    windowed = replace(scheduler.config, window=Window(8))
    assert PromptPass(runner, scheduler.pool, scheduler.config).shared_block == 4
    assert PromptPass(runner, scheduler.pool, windowed).shared_block == 0
    states = StatePool(num_slots=2)
    assert PromptPass(runner, scheduler.pool, scheduler.config, states=states).shared_block == 0


def test_an_abandoned_pass_frees_its_blocks(engine: Engine) -> None:
    prompts = [list(range(3, 60))]
    with pytest.raises(KeyboardInterrupt), engine.prompt_pass() as passes:
        passes.hidden(next(plan_steps([57], [passes])), prompts)
        assert engine.scheduler.pool.num_free < 40
        raise KeyboardInterrupt
    engine.scheduler.pool.check_integrity([])


def test_what_does_not_fit_is_refused(engine: Engine) -> None:
    passes: PromptPass
    with engine.prompt_pass() as passes:
        passes.check_fits(160)
        with pytest.raises(BadInput, match="161 tokens to score exceed"):
            passes.check_fits(161)
    with pytest.raises(BadInput, match="no adapter 'x'"):
        engine.prompt_pass("x")


def test_each_request_gets_its_own_number_of_prompt_logprobs(engine: Engine) -> None:
    prompt = list(range(3, 12))
    for count in (0, 2, None):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=count)
        engine.add_request(str(count), prompt, params)
    scored = {}
    while engine.has_unfinished():
        for output in engine.step():
            scored[output.request_id] = output.prompt_logprobs
    assert scored["None"] is None
    for name, count in (("0", 0), ("2", 2)):
        assert {len(each.top) for each in scored[name][1:]} == {count}
    pairs = zip(scored["0"][1:], scored["2"][1:], strict=True)
    assert all(a.logprob == b.logprob and a.rank == b.rank for a, b in pairs)
