"""Which blocks of a sequence no token to come will see, where every layer looks back only so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .block_pool import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class Window:
    """How far every layer of a model looks: `length` tokens back, the new one included, and to the first
    `sinks` tokens of the sequence from anywhere.

        |  sinks  |       nobody looks here       |    length    |
        0       front                     num_computed    ... the next token

    Blocks wholly in the middle go back to the pool.
    """

    length: int
    sinks: int = 0

    @property
    def num_visible(self) -> int:
        """Tokens that a token sees at most."""
        return self.sinks + self.length

    def evicted(self, num_computed: int, block_size: int) -> range:
        """The places in a block table behind which nobody looks once `num_computed` tokens are computed."""
        front = -(-self.sinks // block_size)
        return range(front, max(front, (num_computed - self.length + 1) // block_size))

    def reach(self, num_computed: int, chunk: int) -> int:
        """Tokens for which an admitted sequence takes blocks: until it gives back as many as it takes."""
        return max(num_computed, self.length - 1) + chunk

    def max_blocks(self, chunk: int, block_size: int) -> int:
        """Blocks that a sequence of any length holds at once, if a step computes `chunk` tokens of it."""
        front = -(-self.sinks // block_size)
        return front + (self.length + chunk + 2 * block_size - 3) // block_size


def evicted_places(block_ids: Sequence[int]) -> range:
    """Where a block table has the null block: one run of it, between the first tokens and the window."""
    if NULL_BLOCK not in block_ids:
        return range(0)
    start = low = block_ids.index(NULL_BLOCK)
    high = len(block_ids)
    while high - low > 1:  # the run reaches to `low` at least, and ends before `high`
        middle = (low + high) // 2
        low, high = (middle, high) if block_ids[middle] == NULL_BLOCK else (low, middle)
    return range(start, low + 1)


def evict_blocks(block_ids: list[int], before: range, now: range) -> list[int]:
    """Put the null block in the places `now`, of which those of `before` have it; returns what was there."""
    first = max(now.start, before.stop)
    taken = block_ids[first : now.stop]
    block_ids[first : now.stop] = [NULL_BLOCK] * len(taken)
    return taken
