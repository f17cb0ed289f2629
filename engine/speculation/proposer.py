"""Draft-token proposers: their interface, prompt lookup, and the expansion of draft chains and trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..base.device import HostCopy, packed
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, step_inputs
from ..sampling.rowwise import SamplingRow
from ..sampling.sampler import Sampler
from ..scheduling.draft_length import Tree
from ..scheduling.step_plan import ScheduledRow

DRAFT_STREAM, ACCEPT_STREAM = 1, 2
"""Noise streams of draft sampling and of acceptance; stream 0 is the sampler's."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft tokens of one row.

    Attributes:
        probabilities: the draft distributions q that they were sampled from, float32 [tokens, vocab]; None
            where the proposal is deterministic.
    """

    token_ids: tuple[int, ...]
    tree: Tree
    probabilities: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TargetStates:
    """A row's hidden states after a step, accepted draft tokens included, and the token after each. `hidden`
    [tokens, hidden] is what the LM head reads, then that of `aux_hidden_state_layers`."""

    row: ScheduledRow
    hidden: torch.Tensor
    next_ids: Sequence[int]

    @property
    def place(self) -> tuple[str, int]:
        return self.row.sequence_id, self.row.start + len(self.next_ids)


SamplingRowOf = Callable[[ScheduledRow, Sequence[int]], SamplingRow]
"""The sampling parameters of the token after a row and some draft tokens."""


class Proposer(Protocol):
    """Proposes draft tokens for the rows of a step that have slots for some."""

    bytes_held: int = 0
    aux_hidden_state_layers: tuple[int, ...] = ()
    """Target layers whose input it reads beside the final hidden states (EAGLE-3)."""
    caches: tuple[KvCache, ...] = ()

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """Draft tokens by sequence id, at most the row's `num_draft_tokens`; no entry for rows without."""
        ...

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """Take the target states of a step's rows, before the next `propose`; by default nothing is kept."""


DraftForward = Callable[[Sequence[Run], torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""Runs → final hidden states [tokens, hidden]. The second argument is token ids known only on the device,
int64 [tokens] or None; the third, for a head, the hidden states before the tokens."""


class CachedProposer(Proposer):
    """A draft model or head with its own KV cache, by the target's block ids; `forward` may replay graphs."""

    def __init__(
        self, model: Any, cache: KvCache, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.caches = model, (cache,)
        self.bytes_held = model.bytes_held + cache.num_bytes
        self._cache, self._device, self._dtype = cache, device, dtype
        self._sampler = Sampler()
        self.forward: DraftForward = self._eager
        self.capture_all: Callable[[], None] = lambda: None

    def _eager(
        self, runs: Sequence[Run], token_ids: torch.Tensor | None, before: torch.Tensor | None
    ) -> torch.Tensor:
        inputs = step_inputs(runs, self._cache.block_size, self._device, self._dtype)
        if token_ids is not None:
            inputs.token_ids.copy_(token_ids)
        given = () if before is None else (before,)
        return self.model.forward(inputs, self._cache.layers, *given)


class NgramProposer(Proposer):
    """Proposes what followed the longest earlier match of the last tokens, the latest match among several."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        drafts = {}
        for row in rows:
            count = row.num_draft_tokens
            if count and (tokens := self._look_up(row.tokens[:], count)):
                drafts[row.sequence_id] = DraftTokens(tokens, Tree.chain(len(tokens)))
        return drafts

    def _look_up(self, history: Sequence[int], count: int) -> tuple[int, ...]:
        tokens = np.asarray(history, dtype=np.int64)
        for size in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            # Windows that end before the last token, so that each has a continuation.
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            matches = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
            if matches.size:
                start = int(matches[-1]) + size
                return tuple(tokens[start : start + count].tolist())
        return ()


Choose = Callable[[Sequence[ScheduledRow], Sequence[list[int]], torch.Tensor], torch.Tensor]
"""Rows, their draft tokens so far and float32 logits [rows, vocab] → the next tokens, int64 [rows]."""

Follow = Callable[
    [Sequence[ScheduledRow], Sequence[list[int]], torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""Rows, draft tokens, last ones on the device, rows that go on (None: all) → logits after them."""


def draft_chains(
    rows: Sequence[ScheduledRow], logits: torch.Tensor, choose: Choose, follow: Follow
) -> dict[str, list[int]]:
    """`num_draft_tokens` draft tokens of each row, by sequence; the first of `logits`. The host, with 0 for a
    token, waits once after all, unless sampling depends on their values."""
    chains: dict[str, list[int]] = {row.sequence_id: [] for row in rows}
    going, waits = list(rows), list[Callable[[], None]]()
    while True:
        drafted = [chains[row.sequence_id] for row in going]
        tokens = choose(going, drafted, logits)
        wait = _append(drafted, tokens)
        if any(row.params.reads_tokens for row in going):
            wait()  # the next draft token depends on the values of these
        else:
            waits.append(wait)
        places = [
            index
            for index, (row, chain) in enumerate(zip(going, drafted, strict=True))
            if len(chain) < row.num_draft_tokens
        ]
        if not places:
            break
        kept = None
        if len(places) < len(going):
            (kept,) = packed([places], tokens.device)
            tokens = tokens.index_select(0, kept)
            going = [going[index] for index in places]
        logits = follow(going, [chains[row.sequence_id] for row in going], tokens, kept)
    for wait in waits:
        wait()
    return chains


def _append(chains: Sequence[list[int]], tokens: torch.Tensor) -> Callable[[], None]:
    """Append a token to each chain, 0 until the returned function has waited for it."""
    on_host = HostCopy(tokens)
    places = [len(chain) for chain in chains]
    for chain in chains:
        chain.append(0)

    def wait() -> None:
        for chain, index, token in zip(chains, places, on_host.wait().tolist(), strict=True):
            chain[index] = token

    return wait


def coupled_chains(
    rows: Sequence[ScheduledRow],
    logits: torch.Tensor,
    sampler: Sampler,
    draw: SamplingRowOf,
    follow: Follow,
) -> dict[str, DraftTokens]:
    """`draft_chains`, sampled with the noise that the target's tokens will be sampled with."""

    def choose(
        rows: Sequence[ScheduledRow], chains: Sequence[list[int]], logits: torch.Tensor
    ) -> torch.Tensor:
        sampling = [draw(row, chain) for row, chain in zip(rows, chains, strict=True)]
        return sampler.begin(logits, sampling).tokens

    drafts = draft_chains(rows, logits, choose, follow)
    return {
        name: DraftTokens(tuple(tokens), Tree.chain(len(tokens))) for name, tokens in drafts.items()
    }


class TreeExpansion:
    """The draft tree of one row: `parents` of its nodes, and the `frontier` to expand; -1: the last known
    token.

    A node's value is the product of preferences (see `SamplingKernel`) along its path, an estimate of its
    acceptance. Each level adds the top `width` tokens of every frontier node, and its `width` best nodes are
    the next frontier. At the end the best `num_draft_tokens` become the tree.
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
    """Expand trees level by level, one wait for the device each; draft tokens by sequence id. `logits` gives
    float32 [nodes, vocab] for the frontiers of the trees passed to it, concatenated."""
    active = list(expansions)
    while active:
        sampling = [draw(tree.row, tree.path(index)) for tree in active for index in tree.frontier]
        preferences = sampler.preferences(logits(active), sampling)
        largest = preferences.topk(min(active[0].width, preferences.shape[-1]))
        # Both copies are on their way before the first is waited for.
        values, tokens = [copy.wait().tolist() for copy in [HostCopy(tensor) for tensor in largest]]
        begin = 0
        for tree in active:
            end = begin + len(tree.frontier)
            tree.extend(values[begin:end], tokens[begin:end])
            begin = end
        active = [tree for tree in active if tree.level < tree.depth]
    return {tree.row.sequence_id: tree.draft() for tree in expansions}
