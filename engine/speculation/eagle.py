"""EAGLE proposer: a one-layer draft head over the target's hidden states, with its own KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..base.transfer import packed
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, step_inputs
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .chain_expansion import coupled_chains
from .eagle_head import EagleHead
from .proposer import DraftTokens, SamplingRowOf, TargetStates
from .tree_expansion import TreeExpansion, expand_trees

HeadForward = Callable[[Sequence[Run], torch.Tensor | None, torch.Tensor], torch.Tensor]
"""From runs, token ids that only the device knows in place of theirs, int64 [tokens] or None, and the hidden
states before the tokens to the head's hidden states [tokens, hidden]."""


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

    A chain (`width` 1) stays on the device, and the host waits once, after its last token; of a tree it
    chooses each level's frontier.

    So blocks shared through the prefix cache hold the head's keys and values too. The last slot of a shared
    prefix holds the pair with the token that followed there, and a forked sequence starts without a hidden
    state; both only lower acceptance.
    """

    def __init__(
        self, head: EagleHead, cache: KvCache, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self.head = head
        self._cache = cache
        self.caches = (cache,)
        self._width = width
        self._device = device
        self._dtype = dtype
        self._sampler = Sampler()
        self._hidden: dict[tuple[str, int], torch.Tensor] = {}
        self.forward: HeadForward = self._eager
        """May replay graphs instead, which `capture_all` captures."""
        self.capture_all: Callable[[], None] = lambda: None

    @property
    def bytes_held(self) -> int:
        """See `Proposer`."""
        return self.head.bytes_held + self._cache.num_bytes

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """See `Proposer`."""
        runs = [Run(step.row.start, step.next_ids, step.row.block_ids) for step in steps]
        hidden = self.head.known(torch.cat([step.hidden for step in steps]))
        ends = [end - 1 for end in accumulate(len(run.token_ids) for run in runs)]
        # A copy: the next replay of a graph overwrites its result.
        last = self.forward(runs, None, hidden).index_select(0, packed([ends], self._device)[0])
        self._hidden = {step.place: state for step, state in zip(steps, last, strict=True)}

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """See `Proposer`."""
        known = {
            row.sequence_id: hidden
            for row in rows
            if row.num_draft_tokens
            and (hidden := self._hidden.get((row.sequence_id, row.end - 1))) is not None
        }
        rows = [row for row in rows if row.sequence_id in known]
        if self._width == 1:
            return self._chains(rows, known, draw) if rows else {}
        head_trees = {
            row.sequence_id: _HeadTree(
                TreeExpansion(row, self._width), {-1: known[row.sequence_id]}
            )
            for row in rows
        }

        def logits(active: Sequence[TreeExpansion]) -> torch.Tensor:
            trees = [head_trees[expansion.row.sequence_id] for expansion in active]
            if active[0].level:
                before = [hidden for tree in trees for hidden in tree.before()]
                runs = [tree.run() for tree in trees]
                states = self.forward(runs, None, torch.stack(before))
                by_tree = states.split([len(run.token_ids) for run in runs])
                for tree, states in zip(trees, by_tree, strict=True):
                    tree.hidden |= zip(tree.expansion.frontier, states.unbind(), strict=True)
            hidden = [tree.hidden[index] for tree in trees for index in tree.expansion.frontier]
            return self.head.logits(torch.stack(hidden))

        expansions = [tree.expansion for tree in head_trees.values()]
        return expand_trees(expansions, self._sampler, draw, logits)

    def _chains(
        self,
        rows: Sequence[ScheduledRow],
        known: Mapping[str, torch.Tensor],
        draw: SamplingRowOf,
    ) -> Mapping[str, DraftTokens]:
        hidden = torch.stack([known[row.sequence_id] for row in rows])

        def follow(
            rows: Sequence[ScheduledRow],
            chains: Sequence[list[int]],
            tokens: torch.Tensor,
            kept: torch.Tensor | None,
        ) -> torch.Tensor:
            nonlocal hidden
            before = hidden if kept is None else hidden.index_select(0, kept)
            # The pair of the last known token is in the slot before it.
            runs = [
                Run(row.end - 2 + len(chain), chain[-1:], row.block_ids)
                for row, chain in zip(rows, chains, strict=True)
            ]
            hidden = self.forward(runs, tokens, before)
            return self.head.logits(hidden)

        return coupled_chains(rows, self.head.logits(hidden), self._sampler, draw, follow)

    def _eager(
        self, runs: Sequence[Run], token_ids: torch.Tensor | None, before: torch.Tensor
    ) -> torch.Tensor:
        inputs = step_inputs(runs, self._cache.block_size, self._device, self._dtype)
        if token_ids is not None:
            inputs.token_ids.copy_(token_ids)
        return self.head.forward(inputs, before, self._cache.layers)
