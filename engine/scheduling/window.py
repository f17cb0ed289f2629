"""Eviction of KV blocks behind a sliding window, with attention sinks (StreamingLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .block_pool import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class Window:
    """The visible window of every layer: the last `length` tokens, the new one included, and `sinks` first
    tokens of the sequence.

        |  sinks  |            evicted            |    length    |
        0                                 num_computed    ... the next token

    Blocks wholly in the middle are freed.
    """

    length: int
    sinks: int = 0

    @property
    def num_visible(self) -> int:
        """Maximum number of tokens that a token attends to."""
        return self.sinks + self.length

    def evicted(self, num_computed: int, block_size: int) -> range:
        """Indices of a block table that no later token attends to, after `num_computed` tokens."""
        first = -(-self.sinks // block_size)
        return range(first, max(first, (num_computed - self.length + 1) // block_size))

    def reach(self, num_computed: int, chunk: int) -> int:
        """Tokens that an admitted sequence gets blocks for: from there on it frees as many as it takes."""
        return max(num_computed, self.length - 1) + chunk

    def max_blocks(self, chunk: int, block_size: int) -> int:
        """Blocks that a sequence of any length holds at once, with steps of `chunk` of its tokens."""
        first = -(-self.sinks // block_size)
        return first + (self.length + chunk + 2 * block_size - 3) // block_size


def evicted_places(block_ids: Sequence[int]) -> range:
    """Indices of a block table with the null block: one run, between the sinks and the window."""
    if NULL_BLOCK not in block_ids:
        return range(0)
    start = low = block_ids.index(NULL_BLOCK)
    high = len(block_ids)
    while high - low > 1:  # the run reaches to `low` at least, and ends before `high`
        middle = (low + high) // 2
        low, high = (middle, high) if block_ids[middle] == NULL_BLOCK else (low, middle)
    return range(start, low + 1)


def evict_blocks(block_ids: list[int], before: range, now: range) -> list[int]:
    """Put the null block at the indices `now`, where `before` have it; returns the evicted blocks."""
    first = max(now.start, before.stop)
    evicted = block_ids[first : now.stop]
    block_ids[first : now.stop] = [NULL_BLOCK] * len(evicted)
    return evicted
