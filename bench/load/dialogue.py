"""Conversations in flight: which turn is due when, and its prompt from the answers so far."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from ..metrics.trace import RequestTrace
from ..workloads.cycles import Opening, openings
from ..workloads.workload import Workload, WorkloadItem

# A clock's reading less the origin may fall short of the due time that was waited for.
ROUNDING_SECONDS = 1e-9


@dataclass(slots=True)
class Dialogue:
    """One conversation and its present turn: waiting or in flight, with its prompt and due time."""

    item: WorkloadItem
    cycle: int
    due: float
    turn: int
    prompt: tuple[int, ...]

    @property
    def request_id(self) -> str:
        """Unique in a pass: the item's id, with its cycle and turn where they are not the first."""
        return request_id(self.item.request_id, self.cycle, self.turn)

    @property
    def output_len(self) -> int:
        return self.item.output_lens[self.turn]

    def request(self) -> WorkloadItem:
        """The present turn as a request of its own."""
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
        self.due = trace.ended + turn.think_seconds
        self.turn += 1
        return True


def request_id(item_id: str, cycle: int, turn: int) -> str:
    """`bench-7`, `bench-7/2` for its second turn, `bench-7@1/2` for that of the next cycle."""
    return item_id + (f"@{cycle}" if cycle else "") + (f"/{turn + 1}" if turn else "")


def position(name: str) -> int:
    """The position in the workload of the item that a request id belongs to."""
    return int(name.partition("@")[0].partition("/")[0].rpartition("-")[2])


class Dialogues:
    """The conversations of a pass, in the order in which their turns are due.

    A later turn goes before a conversation that has not begun, and needs no place of the limit: it has one.
    """

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
        return Dialogue(item, cycle, due, 0, item.prompt_token_ids)

    def next_due(self) -> float | None:
        """When the next turn is due, as far as is known without further answers; None if nothing waits."""
        times = [self._thinking[0][0]] if self._thinking else []
        if self._next is not None and self._has_place:
            times.append(self._next.due)
        if not times:
            return None
        return min(times) if self._window is None else min(self._window, *times)

    def answered(self, dialogue: Dialogue, trace: RequestTrace) -> None:
        """The present turn of `dialogue` has ended: its next one waits, or its place is free.

        A workload of which every item failed at first is not repeated: the target is not there.
        """
        self._num_answered += trace.success
        self._num_failed += not trace.success
        if self._num_failed >= self._num_items and not self._num_answered:
            self._close()
        if dialogue.answered(trace):
            self._count += 1
            heapq.heappush(self._thinking, (dialogue.due, self._count, dialogue))
        else:
            self._num_open -= 1

    @property
    def _has_place(self) -> bool:
        return self._limit is None or self._num_open < self._limit

    def _close(self) -> None:
        """The window is over: nothing else is sent."""
        self._thinking.clear()
        self._next = None
