"""A step that fails: whose requests end, and that the others go on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.core.engine import Engine

from ..support.live_server import make_engine

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = {"a": [5, 6, 7], "b": [8, 9], "late": [11, 12, 13, 14]}


def finish(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


@pytest.mark.parametrize("part", ["runner.execute", "output_processor.outputs"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_step_ends_its_own_requests(
    part: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("stories260K", async_scheduling=async_scheduling, max_num_seqs=2)
    engine.add_request("late", PROMPTS["late"], PARAMS)
    expected = finish(engine)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, PARAMS)
    for _ in range(4):
        engine.step()

    def fails(*_: Any) -> None:
        raise RuntimeError("out of luck")

    owner, _, name = part.partition(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine, owner), name, fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            for _ in range(3):  # with async scheduling, the step in flight ends first
                engine.step()
    assert sorted(engine.abort_failed()) == ["a", "b"]
    assert engine.abort_failed() == []
    assert finish(engine) == expected
    engine.close()


def test_requests_of_a_scheduler_that_fails_are_the_running_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("stories260K", max_num_seqs=1)
    engine.add_request("a", PROMPTS["a"], PARAMS)
    engine.add_request("b", PROMPTS["b"], PARAMS)
    engine.step()

    def fails(*_: Any) -> None:
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", fails)
        with pytest.raises(ValueError):
            engine.step()
    assert engine.abort_failed() == ["a"]
    assert list(finish(engine)) == ["b"]
