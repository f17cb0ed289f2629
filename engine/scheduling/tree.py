"""Token trees of draft tokens, as parent indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of draft tokens rooted at the last known token; several may be at the same depth.

    Attributes:
        parents: the parent of each draft token, of a smaller index; -1: the last known token.
    """

    parents: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> Tree:
        """A tree of width 1."""
        return cls(tuple(range(-1, length - 1)))

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each draft token, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Number of speculative positions."""
        return max(self.depths, default=0)

    def path(self, index: int) -> list[int]:
        """Indices from the root's child to `index`; none for -1."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.parents[index]
        return path[::-1]

    def child(self, index: int, token_id: int, token_ids: Sequence[int]) -> int | None:
        """The child of `index` that is `token_id`, if any; `token_ids` are those of the tree."""
        for other in range(index + 1, len(self.parents)):
            if self.parents[other] == index and token_ids[other] == token_id:
                return other
        return None
