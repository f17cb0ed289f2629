"""Load generation: sends a workload to a target in a closed or open loop.

A conversation is a dialogue: its next turn is due its think time after the answer before, with a prompt
that holds the answers so far.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import numpy as np

from ...base.progress import Progress, Silent
from ..metrics.metrics import samples
from ..metrics.trace import LoadPass, RequestTrace, StepRecord
from ..workloads.workload import (
    Opening,
    Workload,
    WorkloadItem,
    first_tokens_of_cycles,
    in_cycle,
    openings,
)
from .exchange import turn_due

# A clock's reading less the origin may fall short of the due time that was waited for.
ROUNDING_SECONDS = 1e-9
NEVER = 1 << 30
ROUND_ROBIN, RANDOM = "round-robin", "random"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A streamed chunk: tokens without an end token, its end, or an error, at `time.perf_counter()`."""

    request_id: str
    time: float
    num_tokens: int
    text: str = ""
    finished: bool = False
    error: str = ""
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()


class Target(Protocol):
    """A server or an in-process engine: takes requests, returns timed chunks."""

    def send(self, item: WorkloadItem) -> None:
        """Submit a request without blocking; a rejection is returned as a chunk with an error."""
        ...

    def receive(self, until: float | None) -> list[Chunk]: ...

    def cancel(self, request_id: str | None = None) -> None: ...

    def take_steps(self, origin: float) -> list[StepRecord]:
        """Engine steps since the last call, timed from `origin`; empty where the target has no step trace."""
        ...


def drive(
    target: Target,
    workload: Workload,
    max_concurrency: int | None,
    *,
    window: float | None = None,
    progress: Progress | None = None,
    description: str = "bench",
) -> LoadPass:
    """Send every item when it is due and the concurrency limit allows, and record the deliveries. A
    conversation keeps its permit to its end; a failed turn ends it. With a `window` the workload repeats,
    then drains. Requests that the trace's client left are counted. An interrupt drops those in flight."""
    shown = PassProgress(progress or Silent(), description, workload.num_requests, window)
    dialogues = Dialogues(workload, max_concurrency, window)
    in_flight: dict[str, tuple[RequestTrace, Dialogue]] = {}
    ended: list[RequestTrace] = []
    leaving: list[tuple[float, str]] = []
    num_cancelled = 0
    interrupted = False
    # A collection of all that is there would pause the loop at arbitrary moments; young objects are few.
    thresholds = gc.get_threshold()
    gc.collect(1)
    gc.set_threshold(*thresholds[:2], NEVER)
    origin, began_at = time.perf_counter(), datetime.now().timestamp()
    try:
        while True:
            while dialogue := dialogues.take_due(time.perf_counter() - origin):
                now = time.perf_counter() - origin
                in_flight[dialogue.request_id] = dialogue.trace(now), dialogue
                target.send(dialogue.request())
                if (patience := dialogue.item.cancels(dialogue.turn)) is not None:
                    heapq.heappush(leaving, (now + patience, dialogue.request_id))
            while leaving and leaving[0][0] <= time.perf_counter() - origin + ROUNDING_SECONDS:
                left, name = heapq.heappop(leaving)
                if name in in_flight:
                    target.cancel(name)
                    num_cancelled += 1
                    dialogues.ended(in_flight.pop(name)[1], left)
                    shown.request_ended(left)
            due = dialogues.next_due()
            if due is None and not in_flight:
                break
            if leaving:
                due = leaving[0][0] if due is None else min(due, leaving[0][0])
            for chunk in target.receive(None if due is None else origin + due):
                trace, dialogue = in_flight[chunk.request_id]
                if record(trace, chunk, origin):
                    ended.append(trace)
                    del in_flight[chunk.request_id]
                    dialogues.answered(dialogue, trace)
                    shown.request_ended(trace.ended)
    except KeyboardInterrupt:
        interrupted = True
        target.cancel()
    finally:
        seconds = time.perf_counter() - origin
        gc.set_threshold(*thresholds)
        shown.finish()
    order = {item.request_id: position for position, item in enumerate(workload.items)}
    ended.sort(key=lambda trace: (trace.cycle, order[trace.conversation], trace.turn))
    duration = seconds if window is None else window_duration(window, seconds, interrupted)
    steps = [step for step in target.take_steps(origin) if step.end <= duration or window is None]
    return LoadPass(
        ended,
        duration,
        steps,
        interrupted,
        began_at,
        window=None if window is None else duration,
        drain_seconds=seconds - duration if window is not None else 0.0,
        cancelled=num_cancelled,
    )


def window_duration(window: float, seconds: float, interrupted: bool) -> float:
    return min(window, seconds) if interrupted else window


def record(trace: RequestTrace, chunk: Chunk, origin: float) -> bool:
    """Record a chunk on its request's trace; True when the request has finished."""
    if chunk.num_tokens:
        trace.chunk_times.append(chunk.time - origin)
        trace.chunk_tokens.append(chunk.num_tokens)
    trace.text += chunk.text
    if trace.prompt_token_ids:
        trace.token_ids.extend(chunk.token_ids)
    trace.cached_tokens = max(trace.cached_tokens or 0, chunk.cached_tokens)
    if chunk.finished:
        trace.error = chunk.error or ("" if trace.chunk_times else "the response has no token")
        trace.success = not trace.error
    return chunk.finished


@dataclass(slots=True)
class Dialogue:
    """A conversation and its present turn, waiting or in flight."""

    item: WorkloadItem
    cycle: int
    due: float
    turn: int
    prompt: tuple[int, ...]
    opened: float = 0.0

    @property
    def request_id(self) -> str:
        """Unique in a pass: the item's id, with its cycle and turn where they are not the first."""
        return request_id(self.item.request_id, self.cycle, self.turn)

    @property
    def output_len(self) -> int:
        return self.item.output_lens[self.turn]

    def request(self) -> WorkloadItem:
        return WorkloadItem(
            self.request_id, self.prompt, self.output_len, self.due, images=self.item.images
        )

    def trace(self, sent: float) -> RequestTrace:
        """An empty trace of the present turn, sent at `sent`."""
        return RequestTrace(
            self.request_id,
            len(self.prompt),
            self.output_len,
            scheduled=self.due,
            sent=sent,
            conversation=self.item.request_id,
            turn=self.turn,
            cycle=self.cycle,
            prompt_token_ids=self.prompt if self.item.turns else (),
        )

    def answered(self, trace: RequestTrace) -> bool:
        """Go on to the next turn; False where there is none, or this one failed."""
        if not trace.success or self.turn == len(self.item.turns):
            return False
        turn = self.item.turns[self.turn]
        self.prompt = turn.prompt(self.prompt, trace.token_ids)
        self.due = turn_due(turn.think_seconds, turn.due_seconds, self.opened, trace.ended)
        self.turn += 1
        return True


class Dialogues:
    """Conversations of a pass by due turns; later turns go first, and have their permit already."""

    def __init__(
        self, workload: Workload, max_concurrency: int | None, window: float | None
    ) -> None:
        self._openings: Iterator[Opening] = openings(workload, endless=window is not None)
        self._next = next(self._openings, None)
        self._limit = max_concurrency
        self._window = window
        self._num_open = self._num_failed = self._num_answered = 0
        self._num_items = len(workload.items)
        self._thinking: list[tuple[float, int, Dialogue]] = []
        self._count = 0
        self._names = first_tokens_of_cycles(workload) if window is not None else ()
        self._waiting: dict[tuple[str, int], list[WorkloadItem]] = {}
        for item in workload.items:
            if item.after is not None:
                self._waiting.setdefault(item.after, []).append(item)  # by id and turn

    def take_due(self, now: float) -> Dialogue | None:
        """The next turn that may be sent at `now` (seconds of the pass), or None."""
        now += ROUNDING_SECONDS
        if self._window is not None and now >= self._window:
            self._close()
            return None
        if self._thinking and self._thinking[0][0] <= now:
            return heapq.heappop(self._thinking)[2]
        if self._next is None or not self._has_place or self._next.due > now:
            return None
        cycle, item, due = self._next
        self._next = next(self._openings, None)
        self._num_open += 1
        return Dialogue(item, cycle, due, 0, item.prompt_token_ids, opened=due)

    def next_due(self) -> float | None:
        times = [self._thinking[0][0]] if self._thinking else []
        if self._next is not None and self._has_place:
            times.append(self._next.due)
        if not times:
            return None
        return min(times) if self._window is None else min(self._window, *times)

    def answered(self, dialogue: Dialogue, trace: RequestTrace) -> None:
        """The turn ended: the next waits, or its permit is free; no repeats if all failed at first."""
        self._num_answered += trace.success
        self._num_failed += not trace.success
        if self._num_failed >= self._num_items and not self._num_answered:
            self._close()
        if trace.success:
            self._open_waiting(dialogue, trace.ended)
        if dialogue.answered(trace):
            self._think(dialogue)
        else:
            self._num_open -= 1

    def ended(self, dialogue: Dialogue, at: float) -> None:
        self._num_open -= 1
        self._open_waiting(dialogue, at)

    def _open_waiting(self, dialogue: Dialogue, at: float) -> None:
        """Let the items begin that wait for the present turn of `dialogue`, which ended `at`."""
        for item in self._waiting.get((dialogue.item.request_id, dialogue.turn), ()):
            item = in_cycle(item, dialogue.cycle, self._names)
            due = at + item.gap_seconds
            self._num_open += 1
            self._think(Dialogue(item, dialogue.cycle, due, 0, item.prompt_token_ids, opened=due))

    def _think(self, dialogue: Dialogue) -> None:
        self._count += 1
        heapq.heappush(self._thinking, (dialogue.due, self._count, dialogue))

    @property
    def _has_place(self) -> bool:
        return self._limit is None or self._num_open < self._limit

    def _close(self) -> None:
        self._thinking.clear()
        self._next = None


def request_id(item_id: str, cycle: int, turn: int) -> str:
    """`bench-7`, `bench-7/2` for its second turn, `bench-7@1/2` for that of the next cycle."""
    return item_id + (f"@{cycle}" if cycle else "") + (f"/{turn + 1}" if turn else "")


def adapter_of(request_id: str, names: Sequence[str], assignment: str, seed: int) -> str | None:
    """A request's adapter in every pass and turn, or None: round-robin by position, or drawn by seed."""
    if not names:
        return None
    number = int(request_id.partition("@")[0].partition("/")[0].rpartition("-")[2])
    if assignment == ROUND_ROBIN:
        return names[number % len(names)]
    return random.Random(f"{seed}/{number}").choice(list(names))


class PassProgress:
    """Reports requests to a `Progress`; with a `window` its seconds, and the number of requests as status."""

    def __init__(
        self, progress: Progress, description: str, num_requests: int, window: float | None
    ) -> None:
        self._progress = progress
        self._window = window
        self._num_ended = self._shown_seconds = 0
        self.finish = progress.finish
        if window is None:
            progress.start(description, num_requests, "requests")
        else:
            progress.start(description, math.ceil(window), "seconds")

    def request_ended(self, seconds: float) -> None:
        self._num_ended += 1
        if self._window is None:
            self._progress.advance()
            return
        passed = int(min(seconds, self._window)) - self._shown_seconds
        if passed > 0:
            self._shown_seconds += passed
            self._progress.status(f"{self._num_ended} requests")
            self._progress.advance(passed)


def lora_part(
    loads: Sequence[LoadPass], names: Sequence[str], assignment: str
) -> dict[str, Any] | None:
    """`llmopt.lora` of a result: the assignment, and the figures of each adapter; None without."""
    if not names:
        return None
    traces = [trace for load in loads for trace in load.traces]
    by_adapter: dict[str, Any] = {}
    for name in names:
        own = [trace for trace in traces if trace.lora == name]
        values = samples(own)
        by_adapter[name] = {
            "requests": len(own),
            "failed": sum(not trace.success for trace in own),
            "output_tokens": sum(trace.output_len for trace in own if trace.success),
        }
        for metric in ("ttft", "tpot", "e2el"):
            median = float(np.median(values[metric])) if len(values[metric]) else None
            by_adapter[name][f"median_{metric}_ms"] = median
    return {"assignment": assignment, "by_adapter": by_adapter}
