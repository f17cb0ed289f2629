"""Draft-tree expansion and reranking (Li et al., "EAGLE-2", arXiv:2406.16858, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..base.transfer import HostCopy
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .proposer import DraftTokens, SamplingRowOf


class TreeExpansion:
    """The draft tree of one row.

    A node's value is the product of the preferences (see `SamplingKernel`) along its path, an estimate of
    the probability that the whole path is accepted. Each level adds the top `width` tokens of every
    frontier node, and the `width` best nodes of the level are the next frontier. At the end all nodes are
    reranked, and the best `num_draft_tokens` become the tree.

    Attributes:
        frontier: indices of the nodes that the next level expands; -1: the last known token.
        width: the same of all trees that are expanded together.
        parents: index of each node's parent.
    """

    def __init__(self, row: ScheduledRow, width: int) -> None:
        self.row = row
        self.frontier = [-1]
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.level = 0
        self.depth = -(-row.num_draft_tokens // width)
        self._values: list[float] = []
        self.width = width

    def path(self, index: int) -> list[int]:
        """The tokens on the path from the root to a node, that node included."""
        return [self.tokens[i] for i in Tree(tuple(self.parents)).path(index)]

    def extend(self, values: Sequence[list[float]], tokens: Sequence[list[int]]) -> None:
        """Add a level, from the largest preferences of each frontier node and their tokens."""
        first = len(self.tokens)
        children = zip(self.frontier, values, tokens, strict=True)
        for parent, child_values, child_tokens in children:
            value_of_parent = 1.0 if parent < 0 else self._values[parent]
            self.parents += [parent] * len(child_tokens)
            self.tokens += child_tokens
            self._values += [value_of_parent * value for value in child_values]
        self.frontier = self._best(range(first, len(self.tokens)), self.width)
        self.level += 1

    def draft(self) -> DraftTokens:
        """Rerank: the best `num_draft_tokens` nodes of all levels."""
        # No node is better than its parent, which has the smaller index: parents are kept as well.
        kept = self._best(range(len(self.tokens)), self.row.num_draft_tokens)
        new_index = {index: new for new, index in enumerate(kept)}
        parents = tuple(new_index.get(self.parents[index], -1) for index in kept)
        return DraftTokens(tuple(self.tokens[index] for index in kept), Tree(parents))

    def _best(self, indices: range, count: int) -> list[int]:
        return sorted(sorted(indices, key=lambda i: (-self._values[i], i))[:count])


def expand_trees(
    expansions: Sequence[TreeExpansion],
    sampler: Sampler,
    draw: SamplingRowOf,
    logits: Callable[[Sequence[TreeExpansion]], torch.Tensor],
) -> dict[str, DraftTokens]:
    """Expand the trees level by level, to the depth of each; draft tokens by sequence id.

    `logits` gives float32 [nodes, vocab] for the frontiers of the trees passed to it, concatenated. The host
    waits for the device once a level, whatever the number of trees.
    """
    active = list(expansions)
    while active:
        sampling = [draw(tree.row, tree.path(index)) for tree in active for index in tree.frontier]
        preferences = sampler.preferences(logits(active), sampling)
        largest = preferences.topk(min(active[0].width, preferences.shape[-1]))
        # Both copies are on their way before the first is waited for.
        values, tokens = [copy.wait().tolist() for copy in [HostCopy(each) for each in largest]]
        begin = 0
        for tree in active:
            end = begin + len(tree.frontier)
            tree.extend(values[begin:end], tokens[begin:end])
            begin = end
        active = [tree for tree in active if tree.level < tree.depth]
    return {tree.row.sequence_id: tree.draft() for tree in expansions}
