"""Step plans are immutable: nothing after scheduling changes a plan's rows, in any loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import product
from typing import Any, ClassVar

import pytest
from llmopt.engine import SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.model_runner import ModelRunner
from llmopt.engine.execution.step_loop import DeviceAsyncLoop, SerialLoop, ThreadedLoop
from llmopt.engine.scheduling.block_pool import PrefixCache, evict_blocks
from llmopt.engine.scheduling.decode_schedule import DecodeSchedule
from llmopt.engine.scheduling.request import OUTPUT_PLACEHOLDER, Request, TokenView
from llmopt.engine.scheduling.scheduler import Scheduler
from llmopt.engine.scheduling.step_plan import ScheduledRow, StepPlan
from llmopt.recipes import MODELS

PROMPTS = [[1] + [7 * i + 3 * j + 5 for i in range(2 + 3 * j)] for j in range(7)]
MIXED = [
    SamplingParams(max_tokens=14, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0, stop=("a",)),
    SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(261, 378)),
    SamplingParams(max_tokens=14, temperature=0.7, seed=6, repetition_penalty=1.4, logprobs=1),
    SamplingParams(max_tokens=11, temperature=0.9, seed=7, n=2, prompt_logprobs=1),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempted": {"num_blocks": 14, "max_num_seqs": 4},
    "chunks": {"prefill_chunk_size": 3, "max_num_batched_tokens": 8, "max_num_seqs": 6},
    "stream": {"window": 8, "attention_sinks": 2, "max_model_len": 100, "enforce_eager": True},
    "drafts": {"speculation": SpeculationConfig("ngram", ngram_min=1)},
}
LOOPS = {"serial": SerialLoop, "threaded": ThreadedLoop, "device": DeviceAsyncLoop}


def engine(monkeypatch: pytest.MonkeyPatch, loop: str, options: str) -> Engine:
    monkeypatch.setattr(
        "llmopt.engine.core.build.open_loop",
        lambda runner, device, *, overlapped: LOOPS[loop](runner),
    )
    given = {"num_blocks": 64, "block_size": 4, **OPTIONS[options]}
    return Engine(EngineConfig(MODELS / "stories3M", dtype="float32", num_threads=1, **given))


def run(built: Engine, after_step: Callable[[], None] = lambda: None) -> None:
    """Requests of every kind, one of which is aborted."""
    for index, prompt in enumerate(PROMPTS):
        built.add_request(str(index), prompt, MIXED[index % len(MIXED)])
    count = 0
    while built.has_unfinished():
        built.step()
        count += 1
        if count == 9:
            built.abort("3")
        after_step()
    built.close()


def contents(plan: StepPlan) -> Any:
    """A deep copy of a plan's values."""
    rows = [
        (
            row._replace(tokens=TokenView(())),
            list(row.tokens),
            list(row.token_ids),
            list(row.history),
        )
        for row in plan.rows
    ]
    return [(str(row), *tokens) for row, *tokens in rows], plan.copies


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("loop", "options"), product(LOOPS, OPTIONS))
def test_a_plan_does_not_change_while_later_steps_are_scheduled_and_computed(
    monkeypatch: pytest.MonkeyPatch, loop: str, options: str
) -> None:
    taken: list[tuple[StepPlan, Any]] = []
    schedule, launch = Scheduler.schedule, ModelRunner.launch

    def taking(self: Scheduler, now: float = 0.0) -> StepPlan:
        plan = schedule(self, now)
        taken.append((plan, contents(plan)))
        return plan

    def unchanged() -> None:
        for plan, before in taken:
            assert contents(plan) == before

    def launching(self: ModelRunner, plan: StepPlan, *rest: Any, **more: Any) -> Any:
        before = contents(plan)
        step = launch(self, plan, *rest, **more)
        assert contents(plan) == before
        return step

    monkeypatch.setattr(Scheduler, "schedule", taking)
    monkeypatch.setattr(ModelRunner, "launch", launching)
    run(engine(monkeypatch, loop, options), unchanged)
    assert len(taken) >= 14
    num_waiting = sum(plan.has_placeholders for plan, _ in taken)
    assert num_waiting == 0 if loop == "serial" else num_waiting >= 10 or options == "drafts"


WRITERS = {
    one.__module__ for one in (Scheduler, DecodeSchedule, Request, PrefixCache, evict_blocks)
}


def writer() -> tuple[str, str]:
    """Thread and module of the caller's caller."""
    return threading.current_thread().name, sys._getframe(2).f_globals["__name__"]


class Watched(list[int]):
    """A list that records its writers."""

    writers: ClassVar[set[tuple[str, str]]] = set()


def _noting(name: str) -> Any:
    method = getattr(list, name)

    def noted(self: Watched, *args: Any) -> Any:
        Watched.writers.add(writer())
        return method(self, *args)

    return noted


for _name in (
    *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
    *("__setitem__", "__delitem__", "__iadd__", "__imul__"),
):
    setattr(Watched, _name, _noting(_name))


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """All writers of a request or of one of its lists."""

    def write(self: Request, name: str, value: Any) -> None:
        Watched.writers.add(writer())
        object.__setattr__(self, name, Watched(value) if type(value) is list else value)

    monkeypatch.setattr(Request, "__setattr__", write)
    Watched.writers.clear()
    return Watched.writers


@pytest.mark.sweep(5)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loop", ["serial", "threaded"])
def test_only_the_scheduler_writes_requests_and_only_in_the_thread_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, writers: set[tuple[str, str]], loop: str, options: str
) -> None:
    threads: set[str] = set()
    launch = ModelRunner.launch

    def watched(self: ModelRunner, *args: Any, **more: Any) -> Any:
        threads.add(threading.current_thread().name)
        return launch(self, *args, **more)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    run(engine(monkeypatch, loop, options))
    own = threading.current_thread().name
    assert (own in threads) == (loop == "serial"), "steps are computed in another thread"
    assert {thread for thread, _ in writers} == {own}
    assert {module for _, module in writers} <= WRITERS
    assert {Scheduler.__module__, PrefixCache.__module__} <= {module for _, module in writers}


def test_a_view_is_the_beginning_of_a_list_and_one_token_behind_it() -> None:
    booked = [4, 5, 6, 7]
    for length, last in product((0, 1, 3), (None, 9, OUTPUT_PLACEHOLDER)):
        view = TokenView(booked, length, last)
        expected = booked[:length] + ([] if last is None else [last])
        assert list(view) == expected and len(view) == len(expected)
        assert view.has_placeholder == (last == OUTPUT_PLACEHOLDER)
        bounds = (None, *range(-6, 7))
        for start, stop, stride in product(bounds, bounds, (None, 1, 2, -1)):
            assert list(view[start:stop:stride]) == expected[start:stop:stride]
        for index in range(-len(expected), len(expected)):
            assert view[index] == expected[index]
        with pytest.raises(IndexError):
            view[len(expected)]
        assert list(view.first(length)) == booked[:length]
        assert view.first(len(expected)) is view


def test_a_view_does_not_follow_its_list() -> None:
    booked = [1, 2]
    whole, waiting = TokenView(booked), TokenView(booked, last=OUTPUT_PLACEHOLDER)
    resolved = waiting.resolved(3)
    booked += [3, 4]
    assert [list(one) for one in (whole, waiting, resolved)] == [[1, 2], [1, 2, -1], [1, 2, 3]]
    assert whole.booked is waiting.booked is resolved.booked
    with pytest.raises(AssertionError):
        resolved.resolved(4)


def row(name: str, start: int, end: int, tokens: TokenView) -> ScheduledRow:
    return ScheduledRow(name, start, end, tokens, (1, 2), 1, 2, SamplingParams(), 0)


def test_a_resolved_plan_is_another_plan() -> None:
    known, waiting = TokenView([5, 6, 7]), TokenView([5, 6, 7], last=OUTPUT_PLACEHOLDER)
    behind = row("c", 1, 3, waiting)  # its chunk ends before the token that is being sampled
    plan = StepPlan((row("a", 2, 3, known), row("b", 3, 4, waiting), behind))
    assert [one.has_placeholder for one in plan.rows] == [False, True, False]
    assert plan.has_placeholders and not StepPlan(plan.rows[:1]).has_placeholders
    resolved = plan.resolved({"b": [8], "c": [9], "other": [1]})
    assert not resolved.has_placeholders and plan.has_placeholders
    assert [list(one.token_ids) for one in resolved.rows] == [[7], [8], [6, 7]]
    assert [list(one.token_ids) for one in plan.rows] == [[7], [OUTPUT_PLACEHOLDER], [6, 7]]
    assert list(resolved.rows[2].tokens) == [5, 6, 7, 9]
    assert list(resolved.rows[2].history) == [5, 6, 7]
    assert resolved.rows[0] is plan.rows[0]


def test_a_plan_is_immutable() -> None:
    one: Any = row("a", 2, 3, TokenView([5, 6, 7]))
    plan: Any = StepPlan((one,))
    with pytest.raises(FrozenInstanceError):
        plan.rows = ()
    with pytest.raises(AttributeError):
        one.end = 4
    for values in (one.block_ids, one.tokens):
        with pytest.raises(TypeError):
            values[0] = 4
