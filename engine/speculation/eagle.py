"""EAGLE proposer: a one-layer draft head over the target's hidden states, with its own KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, step_inputs
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .eagle_head import EagleHead
from .proposer import DraftTokens, SamplingRowOf, TargetStates
from .tree_expansion import TreeExpansion, expand_trees


@dataclass(slots=True)
class _HeadTree:
    """The draft tree of a row, as the EAGLE head computes it.

    Attributes:
        hidden: the head's hidden state at each draft token, by its index in the tree; -1: at the last
            known token.
        order: indices of the computed draft tokens, in the order of their slots.
    """

    expansion: TreeExpansion
    hidden: dict[int, torch.Tensor]
    order: list[int] = field(default_factory=list)

    def run(self) -> Run:
        """The run that computes the frontier.

        It starts after the last known token, whose (hidden state, next token) pair is in the last known slot.
        """
        row, parents = self.expansion.row, self.expansion.parents
        start = row.end - 1 + len(self.order)
        self.order += self.expansion.frontier
        slots = {index: slot for slot, index in enumerate(self.order)}
        tree = Tree(tuple(slots.get(parents[index], -1) for index in self.order))
        tokens = [self.expansion.tokens[index] for index in self.expansion.frontier]
        return Run(start, tokens, row.block_ids, tree)

    def before(self) -> list[torch.Tensor]:
        """Hidden states of the frontier tokens' parents."""
        return [self.hidden[self.expansion.parents[index]] for index in self.expansion.frontier]


class EagleProposer:
    """Runs the EAGLE head over every token of every step; expands draft trees from its last hidden states.

    So blocks shared through the prefix cache hold the head's keys and values too. The last slot of a shared
    prefix holds the pair with the token that followed there, and a forked sequence starts without a hidden
    state; both only lower acceptance.
    """

    def __init__(
        self, head: EagleHead, cache: KvCache, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self._head = head
        self._cache = cache
        self.caches = (cache,)
        self._width = width
        self._device = device
        self._dtype = dtype
        self._sampler = Sampler()
        self._hidden: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def bytes_held(self) -> int:
        """See `Proposer`."""
        return self._head.bytes_held + self._cache.num_bytes

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """See `Proposer`."""
        runs = [Run(step.row.start, step.next_ids, step.row.block_ids) for step in steps]
        hidden = self._head.known(torch.cat([step.hidden for step in steps]))
        by_step = self._forward(runs, hidden)
        self._hidden = {step.place: states[-1] for step, states in zip(steps, by_step, strict=True)}

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """See `Proposer`."""
        head_trees = {
            row.sequence_id: _HeadTree(TreeExpansion(row, self._width), {-1: known})
            for row in rows
            if row.num_draft_tokens
            and (known := self._hidden.get((row.sequence_id, row.end - 1))) is not None
        }

        def logits(active: Sequence[TreeExpansion]) -> torch.Tensor:
            trees = [head_trees[expansion.row.sequence_id] for expansion in active]
            if active[0].level:
                before = [hidden for tree in trees for hidden in tree.before()]
                by_tree = self._forward([tree.run() for tree in trees], torch.stack(before))
                for tree, states in zip(trees, by_tree, strict=True):
                    tree.hidden |= zip(tree.expansion.frontier, states.unbind(), strict=True)
            hidden = [tree.hidden[index] for tree in trees for index in tree.expansion.frontier]
            return self._head.logits(torch.stack(hidden))

        expansions = [tree.expansion for tree in head_trees.values()]
        return expand_trees(expansions, self._sampler, draw, logits)

    def _forward(self, runs: Sequence[Run], before: torch.Tensor) -> Sequence[torch.Tensor]:
        """The head's hidden states at the tokens of each run, from those `before` them."""
        inputs = step_inputs(runs, self._cache.block_size, self._device, self._dtype)
        hidden = self._head.forward(inputs, before, self._cache.layers)
        return hidden.split([len(run.token_ids) for run in runs])
