"""Trees of draft tokens, grown from scores level by level: the likeliest are kept, and followed further."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .proposer import DraftTokens, SamplingRowOf


class TreeExpansion:
    """The tree of one row.

    A draft token weighs as much as the preferences for the tokens on the way to it, multiplied: about the
    chance that all of them are accepted. Each level adds the `width` best tokens behind every token of the
    frontier, and the `width` best of the level are the frontier of the next. Of all that was found, the
    best that there are slots for become the tree (Li et al., "EAGLE-2", arXiv:2406.16858, section 4).

    Attributes:
        frontier: draft tokens that the next level follows, by their numbers; -1: the last known token.
        parents: of each draft token found so far.
    """

    def __init__(self, row: ScheduledRow, width: int) -> None:
        self.row = row
        self.frontier = [-1]
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.level = 0
        self.depth = -(-row.num_draft_tokens // width)
        self._weights: list[float] = []
        self._width = width

    def path(self, index: int) -> list[int]:
        """The tokens from the first place down to a draft token."""
        return [self.tokens[i] for i in Tree(tuple(self.parents)).path(index)]

    def extend(self, preferences: torch.Tensor) -> None:
        """Add a level, from preferences [frontier, vocab]."""
        values, tokens = preferences.topk(min(self._width, preferences.shape[-1]))
        first = len(self.tokens)
        found = zip(self.frontier, values.tolist(), tokens.tolist(), strict=True)
        for parent, own_values, own_tokens in found:
            weight = 1.0 if parent < 0 else self._weights[parent]
            self.parents += [parent] * len(own_tokens)
            self.tokens += own_tokens
            self._weights += [weight * value for value in own_values]
        self.frontier = self._best(range(first, len(self.tokens)), self._width)
        self.level += 1

    def draft(self) -> DraftTokens:
        """The best of what was found."""
        # A token weighs no more than its parent, which has the smaller number: it is kept as well.
        accepted = self._best(range(len(self.tokens)), self.row.num_draft_tokens)
        places = {index: place for place, index in enumerate(accepted)}
        parents = tuple(places.get(self.parents[index], -1) for index in accepted)
        return DraftTokens(tuple(self.tokens[index] for index in accepted), Tree(parents))

    def _best(self, indices: range, count: int) -> list[int]:
        return sorted(sorted(indices, key=lambda i: (-self._weights[i], i))[:count])


def expand_trees(
    expansions: Sequence[TreeExpansion],
    sampler: Sampler,
    draw: SamplingRowOf,
    scores: Callable[[Sequence[TreeExpansion]], torch.Tensor],
) -> dict[str, DraftTokens]:
    """Grow trees as deep as there are slots for; draft tokens by sequence.

    `scores` gives float32 [draft tokens, vocab] behind each frontier of some of them, one after the other.
    """
    going = list(expansions)
    while going:
        draws = [draw(one.row, one.path(index)) for one in going for index in one.frontier]
        preferences = sampler.preferences(scores(going), draws)
        for one, own in zip(
            going, preferences.split([len(one.frontier) for one in going]), strict=True
        ):
            one.extend(own)
        going = [one for one in going if one.level < one.depth]
    return {one.row.sequence_id: one.draft() for one in expansions}
