"""Async scheduling: a step is scheduled before the outputs of its predecessor are processed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.model_runner import ModelRunner
from llmopt.engine.execution.step_loop import (
    DeviceAsyncLoop,
    SerialLoop,
    StepRecorder,
    ThreadedLoop,
)
from llmopt.engine.scheduling.step_plan import StepPlan
from llmopt.recipes import MODELS

PROMPT = [1, 403, 407, 261, 378]


@pytest.fixture(params=[ThreadedLoop, DeviceAsyncLoop], autouse=True)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The two async loops, of which a device has one."""

    def opened(runner: ModelRunner, device: torch.device, *, overlapped: bool) -> Any:
        return request.param(runner) if overlapped else SerialLoop(runner)

    monkeypatch.setattr("llmopt.engine.core.build.open_loop", opened)
    return request.param


def engine(**options: Any) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "async_scheduling": True, **options}
    return Engine(EngineConfig(MODELS / "stories3M", dtype="float32", num_threads=1, **options))


def run(built: Engine, name: str, params: SamplingParams) -> tuple[list[int], str]:
    built.add_request(name, PROMPT, params)
    tokens, text = [], ""
    while built.has_unfinished():
        for output in built.step():
            if output.request_id == name:
                tokens += output.new_token_ids
                text += output.new_text
    return tokens, text


@pytest.fixture(scope="module")
def serial() -> Engine:
    return engine(async_scheduling=False)


@pytest.mark.parametrize(
    "own",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"stop": ("was",)},
        {"stop_token_ids": (261,), "min_tokens": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.9, "seed": 4},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"logits_processors": (lambda tokens, scores: scores.roll(tokens[-1] % 3),)},
    ],
    ids=lambda own: " ".join(own),
)
def test_token_dependent_options_use_the_tokens_of_the_step_before(serial, own):
    params = SamplingParams(**{"max_tokens": 24, "temperature": 0, **own})
    built = engine()
    assert run(built, "own", params) == run(serial, "own", params)
    assert run(built, "own", params) == run(serial, "own", params), "with a cached prefix"
    built.close()


def test_nothing_is_left_of_a_request_that_ends_with_a_step_in_flight():
    """A stop string is detected one step late: the blocks are freed, and the text does not grow."""
    built = engine()
    params = SamplingParams(max_tokens=200, temperature=0, stop=("a",))
    first = run(built, "a", params)
    built.add_request("a", PROMPT, SamplingParams(max_tokens=3, temperature=0))
    assert built.stats.kv_blocks_used == 0
    outputs = [output for _ in range(8) for output in built.step()]
    assert sum(len(output.new_token_ids) for output in outputs) == 3
    assert first[1] and "a" not in first[1]
    assert not built.has_unfinished() and built.stats.kv_blocks_used == 0
    built.close()


def test_scores_of_a_text_may_be_asked_for_between_steps(serial):
    built = engine()
    built.add_request("a", PROMPT, SamplingParams(max_tokens=30, temperature=0))
    expected = serial.prompt_logits(PROMPT)
    for _ in range(6):
        built.step()
        torch.testing.assert_close(built.prompt_logits(PROMPT), expected)
    built.abort("a")
    built.close()


@pytest.mark.parametrize("overlapped", [False, True])
def test_after_a_failed_step_the_other_requests_go_on(serial, overlapped):
    def failing(tokens: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 9:
            raise RuntimeError("a user's mistake")
        return scores

    built = engine(async_scheduling=overlapped)
    params = SamplingParams(max_tokens=20, temperature=0)
    built.add_request("good", PROMPT, params)
    built.add_request(
        "bad", PROMPT, SamplingParams(max_tokens=20, temperature=0, logits_processors=(failing,))
    )
    tokens: list[int] = []
    with pytest.raises(RuntimeError, match="a user's mistake"):
        while True:
            for output in built.step():
                tokens += output.new_token_ids if output.request_id == "good" else ()
    built.abort("bad")
    built.scheduler.check_integrity()
    while built.has_unfinished():
        for output in built.step():
            tokens += output.new_token_ids
    assert tokens == run(serial, "good", params)[0]
    assert built.stats.kv_blocks_used == 0
    built.close()


def test_a_trace_has_every_step_that_was_settled():
    built = engine()
    built.recorder = StepRecorder(built.scheduler)
    run(built, "a", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    steps = built.recorder.steps
    assert len(steps) == built.stats.num_steps == 12
    assert sum(step.decode_tokens for step in steps) == 11
    assert all(step.execute_seconds > 0 for step in steps)
    assert [step.start for step in steps] == sorted(step.start for step in steps)
    built.close()


PROMPTS = [PROMPT[:1] + [7 * i + 3 * j + 5 for i in range(2 + 3 * j)] for j in range(7)]
MIXED = [
    SamplingParams(max_tokens=14, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=5, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(261, 378)),
    SamplingParams(max_tokens=14, temperature=0.7, seed=6, repetition_penalty=1.4),
    SamplingParams(max_tokens=11, temperature=0.9, seed=7, n=2, min_tokens=6),
]


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 14, "max_num_seqs": 4},
        {"prefill_chunk_size": 3, "max_num_batched_tokens": 8, "max_num_seqs": 6},
        {"window": 8, "attention_sinks": 2, "max_model_len": 100, "enforce_eager": True},
        {"speculation": SpeculationConfig("ngram", ngram_min=1)},
    ],
    ids=str,
)
def test_requests_of_every_kind_beside_each_other(options: dict[str, Any]) -> None:
    """Preemption, chunked prefill, sliding windows, draft tokens: the tokens of the serial loop."""
    results = []
    for overlapped in (False, True):
        built = engine(async_scheduling=overlapped, **options)
        tokens: dict[tuple[str, int], list[int]] = {}
        for index, prompt in enumerate(PROMPTS):
            built.add_request(str(index), prompt, MIXED[index % len(MIXED)])
        while built.has_unfinished():
            for output in built.step():
                own = tokens.setdefault((output.request_id, output.index), [])
                own += output.new_token_ids
            built.scheduler.check_integrity()
        assert built.stats.kv_blocks_used == 0
        assert built.stats.num_preemptions > 0 or "num_blocks" not in options
        results.append(tokens)
        built.close()
    assert results[0] == results[1]


def test_a_step_is_launched_before_the_tokens_of_its_predecessor_are_known(
    monkeypatch: pytest.MonkeyPatch, loop: type[Any]
) -> None:
    """But not where it looks at them."""
    seen: list[tuple[bool, bool]] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, plan: StepPlan, *rest: Any, **more: Any) -> Any:
        seen.extend((row.has_placeholder, row.params.reads_tokens) for row in plan.rows)
        return launch(self, plan, *rest, **more)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    built = engine()
    for penalty in (0.0, 0.5):
        params = SamplingParams(max_tokens=9, temperature=0, frequency_penalty=penalty)
        run(built, "a", replace(params, ignore_eos=True))
    built.close()
    of_ahead = [(False, False), *[(True, False)] * 8, *[(False, True)] * 9]
    assert seen == (of_ahead if loop is DeviceAsyncLoop else [(False, row[1]) for row in of_ahead])


def test_the_offline_door_takes_it(serial):
    llm = LLM(MODELS / "stories3M", dtype="float32", num_threads=1, async_scheduling=True)
    params = SamplingParams(max_tokens=10, temperature=0)
    assert llm.generate([PROMPT], params)[0].token_ids == run(serial, "x", params)[0]
    llm.engine.close()
