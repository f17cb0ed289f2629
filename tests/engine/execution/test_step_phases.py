"""Phases of a step: the engine's own times against an independent clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, groupby
from typing import Any

import pytest
from llmopt.bench.load.inprocess import mean_split
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.decode_graphs import StepGraphs
from llmopt.engine.execution.graph_setting import Forward
from llmopt.engine.execution.step import UNTIMED, PhaseTimer
from llmopt.engine.execution.step_loop import (
    DeviceAsyncLoop,
    SerialLoop,
    StepRecorder,
    StepTrace,
    ThreadedLoop,
)
from llmopt.engine.kernels.attention.dispatch import native_attention

RECORDS = native_attention().reason is None
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PLAIN = ("schedule", "prepare_inputs", "forward", "sample", "fetch_tokens", "update", "detokenize")


def traced(engine: Engine, *, phases: bool) -> list[StepTrace]:
    recorder = engine.recorder = StepRecorder(engine.scheduler, phases=phases)
    engine.add_request("a", [1, 5, 6, 5, 6], PARAMS)
    while engine.has_unfinished():
        engine.step()
    engine.recorder = None
    engine.close()
    return recorder.steps


def opened(**options: Any) -> Engine:
    options = {"dtype": "float32", "num_threads": 1, "overlapped_loop": False} | options
    return LLM("stories3M", device="cpu", max_model_len=64, **options).engine


@pytest.mark.parametrize("loop", [SerialLoop, ThreadedLoop, DeviceAsyncLoop])
def test_the_phases_of_a_step_fit_into_it(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llmopt.engine.core.build.open_loop", lambda runner, _device, **_: loop(runner)
    )
    steps = traced(opened(), phases=True)
    assert len(steps) == 6
    for step in steps:
        assert set(step.phases) == set(PLAIN), (
            "captured greedy steps sample in a phase of their own"
        )
        assert min(step.phases.values()) > 0
        assert step.step_seconds >= sum(step.phases.values())
        assert step.schedule_seconds >= step.phases["schedule"]
        assert step.update_seconds >= step.phases["update"] + step.phases["detokenize"]
        # The async loop counts a step from the end of its predecessor on the device.
        if loop is not DeviceAsyncLoop:
            inside = ("prepare_inputs", "forward", "sample", "fetch_tokens")
            assert step.execute_seconds >= sum(step.phases.get(name, 0.0) for name in inside)


@pytest.mark.parametrize("eager", [False, True])
def test_a_trace_says_whether_its_step_was_replayed(eager: bool) -> None:
    first, *others = traced(opened(enforce_eager=eager), phases=False)
    assert not first.replayed and not first.decode_only, "a prefill is no step of a graph"
    assert all(step.decode_only for step in others)
    assert {step.replayed for step in others} == {RECORDS and not eager}
    assert not any(step.phases for step in (first, *others)), "nobody asked for phases"


def test_no_clock_is_read_without_a_hook() -> None:
    engine = opened()
    assert engine._step_timer() is UNTIMED
    engine.recorder = StepRecorder(engine.scheduler)
    assert engine._step_timer() is UNTIMED
    engine.hook = lambda phase, seconds: None
    assert engine._step_timer() is not UNTIMED
    with UNTIMED("forward"):
        pass
    assert not UNTIMED.seconds


@pytest.mark.parametrize("speculation", [None, SpeculationConfig("ngram")])
def test_a_hook_is_told_of_each_phase_in_order(speculation: SpeculationConfig | None) -> None:
    told: list[str] = []
    engine = opened(speculation=speculation)
    engine.hook = lambda phase, seconds: told.append(phase)
    traced(engine, phases=False)
    inputs = ["prepare_inputs", "draft", "prepare_inputs"] if speculation else ["prepare_inputs"]
    drawn = ["sample", "draft"] if speculation else ["sample", "fetch_tokens"]
    step = ["schedule", *inputs, "forward", *drawn, "update", "detokenize", "step"]
    assert told.count("step") > 1
    assert [phase for phase, _ in groupby(told)] == step * told.count("step")


def test_what_a_hook_does_belongs_to_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Callable[[], int] = count().__next__
    monkeypatch.setattr("llmopt.engine.execution.step.time.perf_counter", clock)
    told: list[tuple[str, float]] = []

    def hook(phase: str, seconds: float) -> None:
        told.append((phase, seconds))
        for _ in range(10):
            clock()

    timer = PhaseTimer(None, hook)
    with timer("forward"):
        clock()
    with timer("sample"):
        pass
    with timer("forward"):
        pass
    assert told == [("forward", 2), ("sample", 1), ("forward", 1)]
    assert timer.seconds == {"forward": 2 + 11 + 1 + 11, "sample": 1 + 11}
    with pytest.raises(ValueError), timer("update"):
        raise ValueError
    assert "update" not in timer.seconds and len(told) == 3


@pytest.mark.parametrize("eager", [False, True])
def test_the_kernels_share_of_a_step_is_that_of_another_clock(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in the functions that compute, against what `bench` makes of the phases."""
    engine = opened(enforce_eager=eager)
    traced(engine, phases=False)  # captures
    now = spent = 0.0
    # Stands still but in the functions that compute, whatever else the machine does.
    monkeypatch.setattr("llmopt.engine.execution.step.time.perf_counter", lambda: now)

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal now, spent
            now += 0.002
            spent += 0.002
            return function(*args, **kwargs)

        return timed

    replays = RECORDS and not eager
    if replays:
        prepare = StepGraphs.prepare

        def prepared(*args: Any, **kwargs: Any) -> Forward | None:
            forward = prepare(*args, **kwargs)
            return None if forward is None else forward._replace(run=clocked(forward.run))

        monkeypatch.setattr(StepGraphs, "prepare", prepared)
    else:
        decoder = type(engine.runner.decoder)
        for name in ("forward", "logits"):
            monkeypatch.setattr(decoder, name, clocked(getattr(decoder, name)))
    recorder = engine.recorder = StepRecorder(engine.scheduler, phases=True)
    engine.add_request("a", [1, 5, 6, 5, 6], PARAMS)
    engine.step()
    recorder.steps.clear()
    spent = 0.0
    while engine.has_unfinished():
        engine.step()
    split = mean_split(recorder.steps)
    assert split["replayed_steps"] == (split["num_steps"] if replays else 0)
    measured = split["parts_ms"]["kernels"] * split["num_steps"] / 1000
    assert measured == pytest.approx(spent) and spent > 0
