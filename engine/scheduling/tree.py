"""The shape of draft tokens: which of them follows which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft tokens that follow the last known token, several of them perhaps in the same place.

    Attributes:
        parents: of each draft token the one that it follows, which comes before it; -1: the last known token.
    """

    parents: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> Tree:
        """Each draft token follows the one before it."""
        return cls(tuple(range(-1, length - 1)))

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """How far behind the last known token each draft token stands, from 1 on."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """How far the draft tokens reach."""
        return max(self.depths, default=0)

    def path(self, index: int) -> list[int]:
        """The draft tokens from the first place down to `index`; none for -1."""
        found = []
        while index >= 0:
            found.append(index)
            index = self.parents[index]
        return found[::-1]

    def child(self, index: int, token_id: int, token_ids: Sequence[int]) -> int | None:
        """The draft token behind `index` that is `token_id`, all of them being `token_ids`."""
        for other in range(index + 1, len(self.parents)):
            if self.parents[other] == index and token_ids[other] == token_id:
                return other
        return None
