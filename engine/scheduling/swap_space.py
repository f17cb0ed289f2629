"""Swap space: host blocks for the KV of preempted sequences, in place of recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .extension import SchedulerExtension
from .request import Request
from .step_plan import Copies, StepPlan


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """The swapped-out KV of a sequence: its first `num_tokens` tokens, less those behind a window.

    `blocks` are host blocks by their index in the sequence's block table.
    """

    num_tokens: int
    blocks: Mapping[int, int]


class SwapSpace(SchedulerExtension):
    """Allocation of host blocks, and the swap copies of the next step.

    A preempted sequence is swapped out if enough host blocks are free, and recomputed otherwise. When it is
    admitted again, or ends, its host blocks are free at once: copies out come before copies in, and sequences
    are preempted before others are admitted, so that the copy of the next owner comes later.
    """

    def __init__(self, num_blocks: int = 0, block_size: int = 1) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks))
        self._swapped: dict[str, SwappedSequence] = {}
        self._out: dict[int, int] = {}  # host block → device block
        self._in: dict[int, int] = {}  # device block → host block
        self.num_swaps = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def preempt(self, request: Request) -> None:
        """Have the next step copy out what the sequence computed, if enough host blocks are free."""
        if request.pooling is not None:
            return  # its hidden states are recomputed with its blocks
        used = -(-request.num_computed_tokens // self._block_size)
        places = [place for place in range(used) if place not in request.evicted]
        if not places or len(places) > len(self._free):
            return
        blocks = {place: self._free.pop() for place in places}
        self._swapped[request.sequence_id] = SwappedSequence(request.num_computed_tokens, blocks)
        self._out |= {host: request.block_ids[place] for place, host in blocks.items()}
        self.num_swaps += 1

    def swapped(self, request: Request) -> SwappedSequence | None:
        return self._swapped.get(request.sequence_id)

    def num_restored(self, request: Request, num_computed: int) -> int:
        swapped = self.swapped(request)
        return num_computed if swapped is None else max(num_computed, swapped.num_tokens)

    def admit(self, request: Request, num_hits: int, new: Mapping[int, int]) -> None:
        """Have the next step copy the host blocks of a swapped-out sequence to its `new` blocks."""
        if (swapped := self.swapped(request)) is not None:
            self._in |= {new[place]: host for place, host in swapped.blocks.items() if place in new}
            self._release(request)

    def forget(self, request: Request) -> None:
        """Free the host blocks of a sequence, and cancel its copies that are pending."""
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
        to_host, from_host = self.take_copies()
        return replace(plan, copies=replace(plan.copies, to_host=to_host, from_host=from_host))

    def take_copies(self) -> tuple[Copies, Copies]:
        """Take the pending copies of a step: (device, host) blocks out, then (host, device) blocks in."""
        out = tuple((device, host) for host, device in self._out.items())
        back = tuple((host, device) for device, host in self._in.items())
        self._out.clear()
        self._in.clear()
        return out, back

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Assert that every host block is free or belongs to one waiting sequence."""
        held = [host for swapped in self._swapped.values() for host in swapped.blocks.values()]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks))
        assert self._swapped.keys() <= {request.sequence_id for request in waiting}

    def _release(self, request: Request) -> None:
        self._free += self._swapped.pop(request.sequence_id).blocks.values()
