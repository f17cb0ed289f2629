"""Draft tokens from a head that goes on from the model's hidden states, with a KV cache of its own."""

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
    """The draft tokens of a tree that the head has computed, in the order of their slots.

    Attributes:
        hidden: behind each of them, by its number in the tree; -1: behind the last known token.
    """

    expansion: TreeExpansion
    hidden: dict[int, torch.Tensor]
    order: list[int] = field(default_factory=list)

    def run(self) -> Run:
        """Compute the frontier: behind the last known token, whose pair lies in the last known slot."""
        row, parents = self.expansion.row, self.expansion.parents
        start = row.end - 1 + len(self.order)
        self.order += self.expansion.frontier
        places = {index: place for place, index in enumerate(self.order)}
        tree = Tree(tuple(places.get(parents[index], -1) for index in self.order))
        tokens = [self.expansion.tokens[index] for index in self.expansion.frontier]
        return Run(start, tokens, row.block_ids, tree)

    def before(self) -> list[torch.Tensor]:
        """The hidden states before the tokens of the frontier."""
        return [self.hidden[self.expansion.parents[index]] for index in self.expansion.frontier]


class EagleProposer:
    """Sees every token of every step, so a block that the prefix cache shares holds its keys and values too.

    Where a prefix was shared, the last slot of it holds the pair with the token that followed there, and a
    fork begins without a hidden state: both cost acceptance at most.
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
        known = self._head.known(torch.cat([step.hidden for step in steps]))
        pieces = self._forward(runs, known)
        self._hidden = {step.place: own[-1] for step, own in zip(steps, pieces, strict=True)}

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

        def scores(going: Sequence[TreeExpansion]) -> torch.Tensor:
            own = [head_trees[expansion.row.sequence_id] for expansion in going]
            if going[0].level:
                before = [hidden for one in own for hidden in one.before()]
                pieces = self._forward([one.run() for one in own], torch.stack(before))
                for one, piece in zip(own, pieces, strict=True):
                    one.hidden |= zip(one.expansion.frontier, piece.unbind(), strict=True)
            hidden = [one.hidden[index] for one in own for index in one.expansion.frontier]
            return self._head.logits(torch.stack(hidden))

        return expand_trees(
            [one.expansion for one in head_trees.values()], self._sampler, draw, scores
        )

    def _forward(self, runs: Sequence[Run], before: torch.Tensor) -> Sequence[torch.Tensor]:
        """Hidden states behind the tokens of each run."""
        inputs = step_inputs(runs, self._cache.block_size, self._device, self._dtype)
        hidden = self._head.forward(inputs, before, self._cache.layers)
        return hidden.split([len(run.token_ids) for run in runs])
