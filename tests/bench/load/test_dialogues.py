"""Conversations in flight and passes of fixed duration, against a target of known latency."""

from __future__ import annotations

import pytest
from llmopt.bench.load.load import ROUND_ROBIN, adapter_of, drive, request_id
from llmopt.bench.metrics.metrics import aggregate
from llmopt.bench.workloads.workload import (
    ConversationTurn,
    Message,
    Workload,
    WorkloadItem,
    numbered,
    openings,
)

from .test_load import Clock, SteppingTarget, clock, workload

__all__ = ["clock"]


def conversation(number: int, *lengths: int, think: float = 0.0) -> WorkloadItem:
    asked = (Message("user", "x"),)
    later = tuple(ConversationTurn((8, 9), length, asked, think) for length in lengths[1:])
    return WorkloadItem(f"bench-{number}", (1, 2, 3), lengths[0], 0.0, asked, later)


def talks(*items: WorkloadItem) -> Workload:
    return Workload("sharegpt", "test", items)


def test_a_turn_follows_the_answer_and_its_think_time(clock: Clock) -> None:
    found = drive(SteppingTarget(clock), talks(conversation(0, 3, 2, 1, think=0.5)), None)
    assert [t.request_id for t in found.traces] == ["bench-0", "bench-0/2", "bench-0/3"]
    assert [t.sent for t in found.traces] == pytest.approx([0.0, 0.53, 1.05])
    assert [t.scheduled for t in found.traces] == pytest.approx([0.0, 0.53, 1.05])
    assert [t.turn for t in found.traces] == [0, 1, 2]


def test_prompts_hold_the_history(clock: Clock) -> None:
    target = SteppingTarget(clock)
    prompts: dict[str, tuple[int, ...]] = {}
    send = target.send
    target.send = lambda item: (
        prompts.update({item.request_id: item.prompt_token_ids}),
        send(item),
    )[1]  # type: ignore[method-assign]
    found = drive(target, talks(conversation(0, 2, 1)), None)
    # This target tells no token ids, so the answer adds none.
    assert prompts["bench-0/2"] == (1, 2, 3, 8, 9)
    assert found.traces[1].prompt_len == 5


def test_a_conversation_keeps_its_place_while_it_thinks(clock: Clock) -> None:
    items = [conversation(n, 1, 1, think=1.0) for n in range(3)]
    found = drive(SteppingTarget(clock), talks(*items), 2)
    sent = {t.request_id: t.sent for t in found.traces}
    assert sent["bench-0/2"] == pytest.approx(1.01)
    # The third waits until one of the two places is free, not merely until nothing is in flight.
    assert sent["bench-2"] == pytest.approx(1.02)
    assert len(found.traces) == 6


def test_a_failed_turn_ends_its_conversation_alone(clock: Clock) -> None:
    target = SteppingTarget(clock, fails="bench-0")
    found = drive(target, talks(conversation(0, 2, 2), conversation(1, 2, 2)), 1)
    assert [t.request_id for t in found.traces] == ["bench-0", "bench-1", "bench-1/2"]
    assert [t.success for t in found.traces] == [False, True, True]


def test_a_window_repeats_the_workload_and_drains(clock: Clock) -> None:
    target = SteppingTarget(clock)
    found = drive(target, workload(4, 4), 2, window=0.105)
    # Two at a time, 40 ms each: sent at 0, 40 and 80 ms; the last two end at 120 ms.
    assert [t.sent for t in found.traces] == pytest.approx([0, 0, 0.04, 0.04, 0.08, 0.08])
    assert [t.cycle for t in found.traces] == [0, 0, 1, 1, 2, 2]
    assert (found.window, found.duration) == (0.105, 0.105)
    assert found.drain_seconds == pytest.approx(0.015)
    assert [found.is_drained(t) for t in found.traces] == [False] * 4 + [True] * 2
    figures = aggregate([found], metrics=("e2el",), percentiles=(50,))
    # Four of six completed in the window, and ten of twelve steps' tokens came in it.
    assert figures["request_throughput"] == pytest.approx(4 / 0.105)
    assert figures["total_output_tokens"] == 2 * 10
    assert figures["output_throughput"] == pytest.approx(20 / 0.105)
    assert figures["completed"] == 6 and figures["mean_e2el_ms"] == pytest.approx(40)


def test_a_window_sends_no_turn_after_it(clock: Clock) -> None:
    found = drive(SteppingTarget(clock), talks(conversation(0, 1, 1, think=0.2)), 1, window=0.1)
    assert [t.request_id for t in found.traces] == ["bench-0"]
    assert found.duration == pytest.approx(0.1)


def test_a_workload_that_fails_whole_is_not_repeated(clock: Clock) -> None:
    found = drive(SteppingTarget(clock, fails="bench-0"), workload(2), 1, window=5.0)
    assert [t.success for t in found.traces] == [False]


def test_an_interrupted_window_counts_what_it_was(clock: Clock) -> None:
    found = drive(SteppingTarget(clock, interrupt_after=4), workload(2, 2), 2, window=5.0)
    assert found.interrupted and found.duration == pytest.approx(0.03)
    assert len(found.traces) == 2


def test_an_open_loop_goes_on_at_its_rate() -> None:
    timed = workload(1, 1).with_arrivals([0.5, 1.0])
    found = openings(timed, endless=True)
    assert [next(found).due for _ in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])


def test_cycles_have_prompts_of_their_own() -> None:
    source = Workload("custom", "test", numbered([((1, 2, 3, 4), 1), ((1, 5, 6), 1)]))
    found = openings(source, endless=True)
    prompts = [next(found).item.prompt_token_ids for _ in range(6)]
    assert prompts[:2] == [(1, 2, 3, 4), (1, 5, 6)]
    starts = [prompt[0] for prompt in prompts]
    # What prompts share within a cycle they still share, and cycles share nothing.
    assert starts[2] == starts[3] != starts[4] == starts[5] and 1 not in starts[2:]
    assert [prompt[1:] for prompt in prompts[2:4]] == [(2, 3, 4), (5, 6)]


def test_request_ids_name_cycle_and_turn() -> None:
    assert request_id("bench-7", 0, 0) == "bench-7"
    assert request_id("bench-7", 2, 1) == "bench-7@2/2"
    names = [str(number) for number in range(10)]
    for name in ("bench-7@2/2", "bench-7/3", "bench-7"):
        assert adapter_of(name, names, ROUND_ROBIN, 0) == "7"
