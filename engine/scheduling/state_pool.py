"""State slots: one for each running sequence of a model with constant state, and checkpoints at block ends.

A layer of Mamba, linear attention or short convolutions keeps a state of constant size, whatever the length
of the sequence. It overwrites it with every token, so that a prefix-cache hit needs a copy of the state as it
was at the end of the last shared block: a checkpoint.

    | null |        slots of running sequences        |      checkpoints      |
      0       1                        num_slots        ...  num_slots + num_checkpoints
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from .request import NULL_SLOT, Request
from .step_plan import Copies


class _Checkpoint(NamedTuple):
    """A saved state, the hash of the tokens before its last block, and that block's tokens."""

    slot: int
    parent_hash: bytes
    token_ids: tuple[int, ...]


class StatePool:
    """Allocation of state slots, and the state copies of the next step.

    A slot has one owner. A sequence starts from nothing at position 0, from a checkpoint after a prefix-cache
    hit, and from its parent's slot after a fork. Steps run in order, and in a step copies come first and
    checkpoints are saved last, so that a slot which is freed may be taken at once.

    `num_checkpoints` bounds the saved states, of which the least recently used is overwritten. With
    `num_slots` 0 the model has no state, and every sequence has the null slot.
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
        """Whether one more sequence can run."""
        return not self.num_slots or bool(self._free)

    def num_restorable(self, request: Request, num_hits: int) -> int:
        """Blocks, of `num_hits` that are cached, behind which a sequence can go on."""
        if not self.num_slots:
            return num_hits
        return next((n for n in range(num_hits, 0, -1) if self._checkpoint(request, n)), 0)

    def admit(self, request: Request, num_hits: int) -> int:
        """A slot for a sequence; behind `num_hits` blocks, the next step restores their checkpoint."""
        slot = self.allocate()
        if self.num_slots and num_hits:
            checkpoint = self._checkpoint(request, num_hits)
            assert checkpoint is not None, "there is no state to go on from"
            self._saved.move_to_end(request.block_hashes[num_hits - 1])
            self._copies[slot] = checkpoint.slot
        return slot

    def fork(self, parent_slot: int) -> int:
        """A slot for a forked sequence, into which the next step copies its parent's state."""
        slot = self.allocate()
        if self.num_slots:
            self._copies[slot] = parent_slot
        return slot

    def allocate(self) -> int:
        """Take a slot; the caller has checked `has_free`."""
        return self._free.pop() if self.num_slots else NULL_SLOT

    def free(self, slot: int) -> None:
        """Give a slot back.

        A pending copy may write to it. It does no harm: the next owner starts from nothing, or its own copy
        replaces that one.
        """
        if slot != NULL_SLOT:
            self._free.append(slot)

    def chunk(self, request: Request, num_new: int) -> int:
        """At most `num_new` tokens of a prompt, so that the step ends where a checkpoint can be saved."""
        if not self.num_checkpoints or num_new == 1:
            return num_new
        start = request.num_computed_tokens
        last = min(start + num_new, request.num_tokens - 1)
        return max(last // self._block_size * self._block_size - start, 0) or num_new

    def begin_save(self, request: Request, end: int) -> int:
        """The slot into which a step that computes up to `end` saves the state, or the null slot."""
        if not self.num_checkpoints or end % self._block_size:
            return NULL_SLOT
        num_blocks = end // self._block_size
        if len(request.block_hashes) >= num_blocks and self._checkpoint(request, num_blocks):
            self._saved.move_to_end(request.block_hashes[num_blocks - 1])
            return NULL_SLOT
        self._drop_superseded(request, num_blocks - 1)
        if not self._unused:
            if not self._saved:
                return NULL_SLOT
            self._unused.append(self._saved.popitem(last=False)[1].slot)
        slot = self._unused.pop()
        self._saving.add(slot)
        return slot

    def end_save(self, slot: int, request: Request | None, end: int) -> None:
        """A step saved a state; without `request`, or if its blocks are not hashed, it is dropped."""
        if slot not in self._saving:
            return
        self._saving.remove(slot)
        num_blocks = end // self._block_size
        hashes = [] if request is None else request.block_hashes
        if request is None or len(hashes) < num_blocks or hashes[num_blocks - 1] in self._saved:
            self._unused.append(slot)
            return
        parent = hashes[num_blocks - 2] if num_blocks > 1 else b""
        self._saved[hashes[num_blocks - 1]] = _Checkpoint(
            slot, parent, self._tokens(request, num_blocks)
        )

    def take_copies(self) -> Copies:
        """Take the copies (source, destination) of a step, which come before its forward pass."""
        copies = tuple((source, destination) for destination, source in self._copies.items())
        self._copies.clear()
        return copies

    def reset_in_flight(self) -> None:
        """Drop the pending copies and the checkpoints that in-flight steps save."""
        self._copies.clear()
        self._unused += self._saving
        self._saving.clear()

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert that every slot is free or has one owner, and every checkpoint one state or none."""
        held = [request.state_slot for request in running]
        if not self.num_slots:
            assert not any(held) and not self._free, "a slot of a model without state"
            return
        assert sorted([*held, *self._free]) == list(range(1, self.num_slots + 1))
        saved = [checkpoint.slot for checkpoint in self._saved.values()]
        last = self.num_slots + self.num_checkpoints
        assert sorted([*saved, *self._saving, *self._unused]) == list(
            range(self.num_slots + 1, last + 1)
        )

    def _drop_superseded(self, request: Request, num_blocks: int) -> None:
        """Drop the checkpoint behind that many blocks if it is in a sequence's output.

        Of an output the newest is kept, for the next turn of a conversation; a long one would otherwise
        overwrite the checkpoints of every prompt.
        """
        if num_blocks * self._block_size <= request.num_prompt_tokens:
            return
        if len(request.block_hashes) >= num_blocks and self._checkpoint(request, num_blocks):
            checkpoint = self._saved.pop(request.block_hashes[num_blocks - 1])
            self._unused.append(checkpoint.slot)

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
