"""State slots: one for each running sequence of a model with constant state, and checkpoints at block ends.

A layer of Mamba, linear attention or short convolutions keeps a state of constant size, whatever the length
of the sequence. It overwrites it with every token, so that a prefix-cache hit needs a copy of the state as it
was at the end of the last shared block: a checkpoint.

    | null |        slots of running sequences        |      checkpoints      |
      0       1                        num_slots        ...  num_slots + num_checkpoints
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from .extensions import SchedulerExtension
from .request import NULL_SLOT, Request
from .step_plan import Copies, ScheduledRow, StepPlan


class _Checkpoint(NamedTuple):
    """A saved state, the hash of the tokens before its last block, and that block's tokens."""

    slot: int
    parent_hash: bytes
    token_ids: tuple[int, ...]


class StatePool(SchedulerExtension):
    """Allocation of state slots, and the state copies of the next step.

    A slot has one owner. A sequence starts from nothing, a checkpoint of its prefix, or its parent's slot.
    Copies come first in a step and checkpoints are saved last, so that a freed slot may be taken at once. At
    most `num_checkpoints` are saved, by last use. `num_slots` 0: no state, and the null slot for all.
    """

    def __init__(self, num_slots: int = 0, num_checkpoints: int = 0, block_size: int = 1) -> None:
        self.num_slots = num_slots
        self.num_checkpoints = num_checkpoints if num_slots else 0
        self._block_size = block_size
        self._free = list(range(num_slots, 0, -1))
        self._unused = list(range(num_slots + self.num_checkpoints, num_slots, -1))
        self._saving: set[int] = set()
        self._saved: OrderedDict[bytes, _Checkpoint] = OrderedDict()
        self._copies: dict[int, int] = {}  # destination slot → source slot

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_free(self) -> bool:
        return not self.num_slots or bool(self._free)

    def num_reusable(self, request: Request, num_blocks: int) -> int:
        """The blocks behind which there is a checkpoint to go on from."""
        return next((n for n in range(num_blocks, 0, -1) if self._checkpoint(request, n)), 0)

    def admit(self, request: Request, num_hits: int, new: Mapping[int, int]) -> None:
        """Give a sequence a slot; behind shared blocks, the next step restores their checkpoint."""
        slot = request.state_slot = self.allocate()
        if num_hits:
            checkpoint = self._checkpoint(request, num_hits)
            assert checkpoint is not None, "there is no state to go on from"
            self._saved.move_to_end(request.block_hashes[num_hits - 1])
            self._copies[slot] = checkpoint.slot

    def fork(self, parent: Request, child: Request) -> None:
        """Give a forked sequence a slot, into which the next step copies its parent's state."""
        child.state_slot = self.allocate()
        self._copies[child.state_slot] = parent.state_slot

    def leave(self, request: Request) -> None:
        self.free(request.state_slot)
        request.state_slot = NULL_SLOT

    def allocate(self) -> int:
        return self._free.pop() if self.num_slots else NULL_SLOT

    def free(self, slot: int) -> None:
        """Give a slot back; its next owner starts from nothing or replaces a pending copy to it."""
        if slot != NULL_SLOT:
            self._free.append(slot)

    def chunk(self, request: Request, num_new: int) -> int:
        """Tokens of a prompt up to the end of a block, where a checkpoint can be saved."""
        if not self.num_checkpoints or num_new == 1:
            return num_new
        start = request.num_computed_tokens
        last = min(start + num_new, request.num_tokens - 1)
        return max(last // self._block_size * self._block_size - start, 0) or num_new

    def mark(self, request: Request, row: ScheduledRow) -> ScheduledRow:
        """The row with the slot into which the step saves the state at its end."""
        num_blocks, rest = divmod(row.end, self._block_size)
        if not self.num_checkpoints or rest:
            return row
        if len(request.block_hashes) >= num_blocks and self._checkpoint(request, num_blocks):
            self._saved.move_to_end(request.block_hashes[num_blocks - 1])
            return row
        self._drop_superseded(request, num_blocks - 1)
        if not self._unused:
            if not self._saved:
                return row
            self._unused.append(self._saved.popitem(last=False)[1].slot)
        slot = self._unused.pop()
        self._saving.add(slot)
        return row._replace(checkpoint=slot)

    def end_row(self, request: Request | None, row: ScheduledRow) -> None:
        """Keep the state that a step saved; without `request`, or if its blocks are not hashed, drop it."""
        slot = row.checkpoint
        if slot not in self._saving:
            return
        self._saving.remove(slot)
        num_blocks = row.end // self._block_size
        hashes = [] if request is None else request.block_hashes
        if request is None or len(hashes) < num_blocks or hashes[num_blocks - 1] in self._saved:
            self._unused.append(slot)
            return
        parent = hashes[num_blocks - 2] if num_blocks > 1 else b""
        self._saved[hashes[num_blocks - 1]] = _Checkpoint(
            slot, parent, self._tokens(request, num_blocks)
        )

    def complete(self, plan: StepPlan) -> StepPlan:
        copies: Copies = tuple((source, to) for to, source in self._copies.items())
        self._copies.clear()
        return replace(plan, copies=replace(plan.copies, states=copies))

    def reset_in_flight(self) -> None:
        self._copies.clear()
        self._unused += self._saving
        self._saving.clear()

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert that every slot is free or has one owner, and every checkpoint one state or none."""
        used = [request.state_slot for request in running]
        if not self.num_slots:
            assert not any(used) and not self._free, "a slot of a model without state"
            return
        assert sorted([*used, *self._free]) == list(range(1, self.num_slots + 1))
        saved = [checkpoint.slot for checkpoint in self._saved.values()]
        last = self.num_slots + self.num_checkpoints
        assert sorted([*saved, *self._saving, *self._unused]) == list(
            range(self.num_slots + 1, last + 1)
        )

    def _drop_superseded(self, request: Request, num_blocks: int) -> None:
        """Drop a checkpoint in a sequence's output: only the newest serves the conversation's next turn."""
        if num_blocks * self._block_size <= request.num_prompt_tokens:
            return
        if len(request.block_hashes) >= num_blocks and self._checkpoint(request, num_blocks):
            self._unused.append(self._saved.pop(request.block_hashes[num_blocks - 1]).slot)

    def _checkpoint(self, request: Request, num_blocks: int) -> _Checkpoint | None:
        """The state behind the first blocks of a sequence, whose tokens are compared as the blocks' are."""
        hashes = request.block_hashes
        checkpoint = self._saved.get(hashes[num_blocks - 1])
        parent = hashes[num_blocks - 2] if num_blocks > 1 else b""
        if checkpoint is None or checkpoint.parent_hash != parent:
            return None
        return checkpoint if checkpoint.token_ids == self._tokens(request, num_blocks) else None

    def _tokens(self, request: Request, num_blocks: int) -> tuple[int, ...]:
        end = num_blocks * self._block_size
        return tuple(request.token_ids[end - self._block_size : end])
