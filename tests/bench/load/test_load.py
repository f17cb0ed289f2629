"""The load driver against targets whose latency is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.progress import Silent
from llmopt.bench.load import load
from llmopt.bench.load.inprocess import InProcessTarget
from llmopt.bench.load.load import Chunk, PassProgress, drive
from llmopt.bench.metrics.trace import StepRecord
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.workloads.workload import Workload, WorkloadItem, numbered

STEP = 0.010


@dataclass
class Clock:
    """A clock that advances only when set."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class SteppingTarget:
    """Gives every request one token a step of exactly 10 ms; `tokens_per_chunk` at once after that."""

    clock: Clock
    tokens_per_chunk: int = 1
    fails: str = ""
    interrupt_after: int | None = None
    name: str = "stepping"
    left: dict[str, int] = field(default_factory=dict)
    sent_at: dict[str, float] = field(default_factory=dict)
    most: int = 0
    steps: int = 0
    cancelled: bool = False

    def send(self, item: WorkloadItem) -> None:
        self.left[item.request_id] = item.output_len
        self.sent_at[item.request_id] = self.clock.now
        self.most = max(self.most, len(self.left))

    def receive(self, until: float | None) -> list[Chunk]:
        if not self.left:
            assert until is not None, "nothing to wait for"
            self.clock.now = max(until, self.clock.now)
            return []
        self.steps += 1
        if self.steps == self.interrupt_after:
            raise KeyboardInterrupt
        self.clock.now += STEP
        chunks = []
        for name in list(self.left):
            count = min(self.tokens_per_chunk, self.left[name])
            self.left[name] -= count
            ended = self.left[name] == 0 or name == self.fails
            error = "broken" if name == self.fails else ""
            chunks.append(Chunk(name, self.clock.now, count, "x" * count, ended, error))
            if ended:
                del self.left[name]
        return chunks

    def cancel(self, request_id: str | None = None) -> None:
        self.cancelled = True

    def take_steps(self, origin: float) -> list[StepRecord]:
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def workload(*lengths: int) -> Workload:
    return Workload("custom", "test", numbered([((1, 2, 3), n) for n in lengths]))


def test_known_latencies(clock: Clock) -> None:
    found = drive(SteppingTarget(clock), workload(3, 1), None)
    first, second = found.traces
    assert (first.ttft, first.e2el, first.tpot) == pytest.approx((0.01, 0.03, 0.01))
    assert (second.ttft, second.e2el, second.tpot) == (
        pytest.approx(0.01),
        pytest.approx(0.01),
        None,
    )
    assert first.success and first.text == "xxx" and first.prompt_len == 3
    assert found.duration == pytest.approx(0.03)


def test_chunks_of_several_tokens(clock: Clock) -> None:
    (trace,) = drive(SteppingTarget(clock, tokens_per_chunk=4), workload(9), None).traces
    assert trace.chunk_tokens == [4, 4, 1]
    assert trace.itls == pytest.approx([0.01, 0.01])
    assert trace.token_gaps == pytest.approx([0.0025] * 4 + [0.01])
    assert trace.tpot == pytest.approx(0.02 / 8)


def test_closed_loop_keeps_its_limit(clock: Clock) -> None:
    target = SteppingTarget(clock)
    found = drive(target, workload(*[2] * 7), 3)
    assert target.most == 3
    assert len(found.traces) == 7
    # Three at a time, two steps each: the waves are sent at 0, 20 and 40 ms.
    assert [t.sent for t in found.traces] == pytest.approx([0, 0, 0, 0.02, 0.02, 0.02, 0.04])
    assert [t.queued for t in found.traces] == pytest.approx([t.sent for t in found.traces])


def test_open_loop_sends_when_due(clock: Clock) -> None:
    due = [0.0, 0.015, 0.5]
    found = drive(SteppingTarget(clock), workload(5, 1, 1).with_arrivals(due), None)
    # The second is due while a step runs, so it goes out when that step returns.
    assert [t.sent for t in found.traces] == pytest.approx([0.0, 0.02, 0.5])
    assert [t.queued for t in found.traces] == pytest.approx([0.0, 0.005, 0.0])
    assert found.traces[1].ttft == pytest.approx(0.01)


def test_a_failed_request_is_kept_apart(clock: Clock) -> None:
    found = drive(SteppingTarget(clock, fails="bench-1"), workload(3, 3, 3), None)
    assert [t.success for t in found.traces] == [True, False, True]
    assert found.traces[1].error == "broken"


def test_interrupt_keeps_what_finished(clock: Clock) -> None:
    target = SteppingTarget(clock, interrupt_after=4)
    found = drive(target, workload(2, 9, 3), None)
    assert found.interrupted and target.cancelled
    assert [t.request_id for t in found.traces] == ["bench-0", "bench-2"]


def test_load_refuses_no_concurrency() -> None:
    with pytest.raises(BadInput, match="max_concurrency"):
        checked(BenchOptions, {"max_concurrency": 0}, "option")


class RefusingEngine:
    """An engine that takes no request."""

    stats = SimpleNamespace(num_computed_tokens=0)

    def add_request(self, *_: object, **__: object) -> None:
        raise BadInput("it can never fit")

    def has_unfinished(self) -> bool:
        return False


def test_a_refused_request_fails_alone() -> None:
    target = InProcessTarget(RefusingEngine())  # pyright: ignore[reportArgumentType]
    found = drive(target, workload(3, 3), 1)
    assert [t.error for t in found.traces] == ["it can never fit"] * 2
    assert not any(t.success for t in found.traces)


class LineEngine:
    """One prompt per step first, then one token for every request: the phases are known."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.running: dict[str, int] = {}
        self.computed = 0

    @property
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_computed_tokens=self.computed)

    def add_request(
        self, request_id: str, prompt: tuple[int, ...], params: object, **_: object
    ) -> None:
        self.lengths = len(prompt)
        self.params = params
        self.waiting.append(request_id)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[SimpleNamespace]:
        if self.waiting:
            self.computed += self.lengths
            name = self.waiting.pop(0)
            self.running[name] = 1
            return [self._output(name)]
        self.computed += len(self.running)
        for name in self.running:
            self.running[name] += 1
        outputs = [self._output(name) for name in self.running]
        self.running = {n: c for n, c in self.running.items() if c < self.params.max_tokens}  # pyright: ignore
        return outputs

    def _output(self, name: str) -> SimpleNamespace:
        ended = self.running[name] == self.params.max_tokens  # pyright: ignore
        return SimpleNamespace(
            request_id=name,
            new_token_ids=(5,),
            new_text="y",
            finish_reason="length" if ended else None,
            num_cached_tokens=0,
        )


def test_steps_are_told_apart() -> None:
    engine = LineEngine()
    found = drive(InProcessTarget(engine), workload(3, 3), None)  # pyright: ignore[reportArgumentType]
    assert [step.decode_only for step in found.steps] == [False, False, True, True]
    assert [step.num_first for step in found.steps] == [1, 1, 0, 0]
    assert [step.computed_tokens for step in found.steps] == [3, 3, 2, 2]
    # Prompt of 3 and one token each, then two.
    assert [step.context_tokens for step in found.steps if step.decode_only] == [8, 10]
    assert engine.params.min_tokens == 3 and engine.params.ignore_eos  # pyright: ignore


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (None, [("start", "pass", 3, "requests"), *[("advance", 1)] * 3, ("finish",)]),
        (
            1.5,
            [
                ("start", "pass", 2, "seconds"),
                *[("status", "2 requests"), ("advance", 1)],
                ("finish",),
            ],
        ),
    ],
)
def test_a_pass_tells_how_far_it_is(window: float | None, told: list[tuple[object, ...]]) -> None:
    heard: list[tuple[object, ...]] = []

    class Listener(Silent):
        def __getattribute__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: heard.append((name, *arguments))

    progress = PassProgress(Listener(), "pass", 3, window)
    for seconds in (0.5, 1.2, 2.9):
        progress.request_ended(seconds)
    progress.finish()
    assert [one if len(one) > 1 or one == ("finish",) else (*one, 1) for one in heard] == told
