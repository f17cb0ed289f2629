"""Draft tokens of speculative decoding: their tree, and an adaptive length by acceptance rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft tokens rooted at the last known token (-1); a parent's index is smaller than its children's."""

    parents: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> Tree:
        return cls(tuple(range(-1, length - 1)))

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
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


_DECAY = 0.9  # of the counts so far, per step: about the last ten steps count
_PRIOR_HITS, _PRIOR_TRIALS = 1.4, 2.0  # begin as if 70 % were accepted


@dataclass(slots=True)
class Acceptance:
    """Acceptance rate of one sequence: positions verified (`trials`) and accepted (`hits`), with decay."""

    hits: float = _PRIOR_HITS
    trials: float = _PRIOR_TRIALS

    @property
    def rate(self) -> float:
        return self.hits / self.trials

    def record(self, num_positions: int, num_accepted: int) -> None:
        """Count a step. Positions after the first rejected one are not verified."""
        verified = num_accepted + (num_accepted < num_positions)
        self.hits = _DECAY * self.hits + num_accepted
        self.trials = _DECAY * self.trials + verified


@dataclass(frozen=True, slots=True)
class DraftLength:
    """The draft length k of most `(1 - a^(k+1)) / (1 - a)` tokens in `1 + c k` times a step. As in Leviathan
    et al. 2023, section 3.5, for acceptance a; k is at most `longest`, c is `relative_cost`, and a position
    has `width` draft tokens on average."""

    longest: int
    relative_cost: float
    width: int = 1

    def best(self, rate: float) -> int:
        """Speculative positions for the next step, at least 1, to keep measuring the acceptance rate."""
        rate = min(rate, 0.999)

        def speed(count: int) -> float:
            return (1 - rate ** (count + 1)) / (1 - rate) / (1 + self.relative_cost * count)

        return max(range(1, self.longest + 1), key=speed)
