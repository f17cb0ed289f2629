"""Hooks of the parts that are attached to the scheduler where configured, and the smallest: swap space.

Swap space: host blocks for the KV of preempted sequences, in place of recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .request import Request
from .step_plan import ScheduledRow, StepPlan


class SchedulerExtension:
    """Hooks at the events of a sequence, in the extensions' order; by default they change nothing."""

    @property
    def has_free(self) -> bool:
        return True

    def chunk(self, request: Request, num_new: int) -> int:
        """At most `num_new` tokens of a sequence, so that the step ends where the extension needs it to."""
        return num_new

    def num_reusable(self, request: Request, num_blocks: int) -> int:
        """Blocks, of `num_blocks` that the prefix cache has, that a waiting sequence may share."""
        return num_blocks

    def num_restored(self, request: Request, num_computed: int) -> int:
        """Tokens of a waiting sequence that need no computing, where `num_computed` are in shared blocks."""
        return num_computed

    def num_admitted(self, request: Request, num_tokens: int) -> int:
        """Tokens, of `num_tokens`, that a waiting sequence gets blocks for."""
        return num_tokens

    def admit(self, request: Request, num_hits: int, new: Mapping[int, int]) -> None:
        """Admit a sequence behind `num_hits` shared blocks; `new` are its own by their place in its table."""

    def mark(self, request: Request, row: ScheduledRow) -> ScheduledRow:
        return row

    def end_row(self, request: Request | None, row: ScheduledRow) -> None:
        """Process a row of a step that has ended; `request` is None where its sequence ended before."""

    def fork(self, parent: Request, child: Request) -> None:
        """Have a sequence run that is split off another."""

    def preempt(self, request: Request) -> None:
        """Keep what a running sequence needs later, before its blocks are freed."""

    def leave(self, request: Request) -> None:
        """Free what a running sequence holds, as it ends or waits again."""

    def forget(self, request: Request) -> None:
        """Free what a waiting sequence holds, as it ends or begins anew."""

    def skip_step(self, waiting: Iterable[Request]) -> None:
        """Drop what the step was to do, as it has no rows and is not executed."""

    def complete(self, plan: StepPlan) -> StepPlan:
        return plan

    def reset_in_flight(self) -> None:
        """Drop what in-flight steps were to do, because one failed."""


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """Swapped-out KV of `num_tokens` tokens, without a window's; host `blocks` by block-table index."""

    num_tokens: int
    blocks: Mapping[int, int]


class SwapSpace(SchedulerExtension):
    """Allocation of host blocks, and the swap copies of the next step. A preempted sequence is swapped out if
    enough host blocks are free, else recomputed. Its host blocks are free at once when it is admitted or
    ends: copies out come before copies in."""

    def __init__(self, num_blocks: int = 0, block_size: int = 1) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self.free_ids = list(range(num_blocks))
        self._swapped: dict[str, SwappedSequence] = {}
        self._out: dict[int, int] = {}  # host block → device block
        self._in: dict[int, int] = {}  # device block → host block
        self.num_swaps = 0

    def preempt(self, request: Request) -> None:
        """Have the next step copy out what the sequence computed, if enough host blocks are free."""
        if request.pooling is not None:
            return  # its hidden states are recomputed with its blocks
        used = -(-request.num_computed_tokens // self._block_size)
        places = [index for index in range(used) if index not in request.evicted]
        if not places or len(places) > len(self.free_ids):
            return
        blocks = {index: self.free_ids.pop() for index in places}
        self._swapped[request.sequence_id] = SwappedSequence(request.num_computed_tokens, blocks)
        self._out |= {host: request.block_ids[index] for index, host in blocks.items()}
        self.num_swaps += 1

    def swapped(self, request: Request) -> SwappedSequence | None:
        return self._swapped.get(request.sequence_id)

    def num_restored(self, request: Request, num_computed: int) -> int:
        swapped = self.swapped(request)
        return num_computed if swapped is None else max(num_computed, swapped.num_tokens)

    def admit(self, request: Request, num_hits: int, new: Mapping[int, int]) -> None:
        """Have the next step copy the host blocks of a swapped-out sequence to its `new` blocks."""
        if (swapped := self.swapped(request)) is not None:
            self._in |= {new[index]: host for index, host in swapped.blocks.items() if index in new}
            self._release(request)

    def forget(self, request: Request) -> None:
        if (swapped := self._swapped.get(request.sequence_id)) is not None:
            for host in swapped.blocks.values():
                self._out.pop(host, None)
            self._release(request)

    def skip_step(self, waiting: Iterable[Request]) -> None:
        """Have the sequences recomputed whose copies out are pending."""
        for request in waiting:
            swapped = self.swapped(request)
            if swapped is not None and self._out.keys() & swapped.blocks.values():
                self.forget(request)

    def complete(self, plan: StepPlan) -> StepPlan:
        out = tuple((device, host) for host, device in self._out.items())
        back = tuple((host, device) for device, host in self._in.items())
        self._out.clear()
        self._in.clear()
        return replace(plan, copies=replace(plan.copies, to_host=out, from_host=back))

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        used = [host for swapped in self._swapped.values() for host in swapped.blocks.values()]
        assert sorted([*used, *self.free_ids]) == list(range(self.num_blocks))
        assert self._swapped.keys() <= {request.sequence_id for request in waiting}

    def _release(self, request: Request) -> None:
        self.free_ids += self._swapped.pop(request.sequence_id).blocks.values()
