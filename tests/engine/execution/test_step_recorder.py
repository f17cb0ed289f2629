"""The step trace against the requests given to the engine."""

from __future__ import annotations

import pytest
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.execution.step_loop import StepRecorder, StepTrace

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def traced(llm: LLM, prompts: list[list[int]]) -> list[StepTrace]:
    recorder = llm.engine.recorder = StepRecorder(llm.engine.scheduler)
    llm.generate(prompts, PARAMS)
    llm.engine.recorder = None
    return recorder.steps


def test_a_trace_adds_up():
    llm = LLM("stories260K", dtype="float32", num_threads=1, block_size=4, prefill_chunk_size=8)
    prompts = [[1] + [300 + i] * (5 + 6 * i) for i in range(3)]
    llm.generate(prompts[0], PARAMS)
    before = llm.engine.stats
    llm.engine.reset_prefix_cache()
    steps = traced(llm, prompts)
    after = llm.engine.stats
    assert len(steps) == after.num_steps - before.num_steps, "steps before and after are not in it"
    assert sum(s.prefill_tokens for s in steps) == sum(map(len, prompts))
    assert sum(s.decode_tokens for s in steps) == 3 * 8, "the first token is drawn by the prefill"
    assert steps[0].prefill_tokens == 6 + 8 + 8 and steps[0].decode_tokens == 0
    mixed = [s for s in steps if s.prefill_tokens and s.decode_tokens]
    assert mixed, "the long prompts go on while the short one decodes"
    assert max(s.num_rows for s in steps) == 3
    assert sum(s.num_preemptions for s in steps) == 0
    # The longest prompt is alone at the end: each slot holds one of its tokens or none.
    last = steps[-1]
    assert last.num_rows == 1
    assert last.kv_blocks_used * 4 - last.kv_slots_unfilled == len(prompts[2]) + 8
    for step in steps:
        assert min(step.schedule_seconds, step.execute_seconds, step.update_seconds) > 0
    starts = [s.start for s in steps]
    assert starts == sorted(starts)
    assert llm.engine.stats.kv_blocks_used == 0


def test_preemptions_are_in_the_step_that_made_them():
    llm = LLM("stories260K", dtype="float32", num_threads=1, block_size=2, num_blocks=14)
    steps = traced(llm, [[1, 5, 6], [1, 7, 8], [1, 9, 10]])
    assert sum(s.num_preemptions for s in steps) == llm.engine.stats.num_preemptions > 0
    assert max(s.kv_blocks_used for s in steps) <= 14
    assert sum(s.decode_tokens for s in steps) < 3 * 8, "what is computed again is prefill"
    again = traced(llm, [[1, 5, 6]])
    assert sum(s.num_preemptions for s in again) == 0, "a new trace counts from where it begins"


@pytest.mark.parametrize("block_size", [1, 8])
def test_unfilled_slots_are_less_than_a_block_a_sequence(block_size):
    llm = LLM("stories260K", dtype="float32", num_threads=1, block_size=block_size)
    steps = traced(llm, [[1, 5, 6], [1, 7, 8, 11, 12]])
    assert all(0 <= s.kv_slots_unfilled <= (block_size - 1) * s.num_rows for s in steps)
    assert (sum(s.kv_slots_unfilled for s in steps) == 0) == (block_size == 1)
