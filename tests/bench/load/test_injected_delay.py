"""Injected delays: they lengthen their part of a step, and nothing else."""

from __future__ import annotations

from itertools import count
from unittest.mock import patch

import pytest
from llmopt.bench.load.inprocess import InjectedDelay, InProcessTarget, injected_delay
from llmopt.bench.load.load import drive
from llmopt.bench.workloads.workload import Workload, WorkloadItem
from llmopt.engine import LLM
from llmopt.engine.execution.step_loop import StepRecorder


def test_a_delay_spins_for_the_rest_of_its_factor() -> None:
    delay = InjectedDelay("sample", 3.0)
    with patch("llmopt.bench.load.inprocess.time.perf_counter", count().__next__) as clock:
        delay("sample", 2.0)  # begins at 0, and looks at 1, 2, 3 and 4
        assert clock() == 5
        delay("forward", 2.0)
        delay("step", 2.0)
        assert clock() == 6


def test_what_the_options_ask_for() -> None:
    assert injected_delay(1.0, "step") is None
    assert injected_delay(2.0, "step") == InjectedDelay("step", 2.0)
    assert injected_delay(2.0, "sampler") == InjectedDelay("sample", 2.0)


@pytest.mark.parametrize("delay", [InjectedDelay("step", 3.0), InjectedDelay("sample", 3.0)])
def test_a_delay_stretches_every_step(delay: InjectedDelay) -> None:
    undelayed: list[float] = []

    def hook(phase: str, seconds: float) -> None:
        delay(phase, seconds)
        if phase == delay.phase:
            undelayed.append(seconds)

    engine = LLM("stories260K", num_threads=1, overlapped_loop=False).engine
    engine.hook = hook
    engine.recorder = StepRecorder(engine.scheduler, phases=True)
    workload = Workload("", "", (WorkloadItem("a", (1, 5, 6), 4),))
    seen = drive(InProcessTarget(engine), workload, None)
    assert len(seen.traces) == 1 and seen.traces[0].success
    steps = engine.recorder.steps
    assert len(seen.steps) == len(steps) == len(undelayed) == 4
    for step, record, seconds in zip(steps, seen.steps, undelayed, strict=True):
        lasted = step.phases["sample"] if delay.phase == "sample" else record.seconds
        assert lasted >= 3 * seconds
        assert step.step_seconds >= sum(step.phases.values())
