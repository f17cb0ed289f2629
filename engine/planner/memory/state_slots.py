"""State-slot sizing: how many sequences' constant states are kept, and how many checkpoints of them.

The engine calls it with measured memory, the planner with expected memory.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_SHARE = 2
"""States take at most one part in so many of the memory that the KV cache could have."""


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of constant state, of `slot_bytes` each: one per running sequence, and checkpoints for the prefix
    cache. The engine has one more, the null slot."""

    num_sequences: int = 0
    num_checkpoints: int = 0
    slot_bytes: int = 0

    @property
    def num_slots(self) -> int:
        return self.num_sequences + self.num_checkpoints

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, the null slot included."""
        return (self.num_slots + 1) * self.slot_bytes if self.num_slots else 0


def size_states(
    slot_bytes: int, max_num_seqs: int, *, caching: bool, memory_bytes: int | None
) -> StateSlots:
    """A slot for each of `max_num_seqs` sequences and, with prefix `caching`, as many checkpoints.

    Where they would take more than their share of `memory_bytes` (None: any), checkpoints are left out first,
    then slots, but for one.
    """
    if not slot_bytes:
        return StateSlots()
    checkpoints = max_num_seqs if caching else 0
    if memory_bytes is None:
        return StateSlots(max_num_seqs, checkpoints, slot_bytes)
    affordable = memory_bytes // MEMORY_SHARE // slot_bytes - 1  # less the null slot
    sequences = max(1, min(max_num_seqs, affordable))
    return StateSlots(sequences, max(0, min(checkpoints, affordable - sequences)), slot_bytes)
