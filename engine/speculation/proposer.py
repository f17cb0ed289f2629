"""Speculative proposers: draft tokens for the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..cache.kv_cache import KvCache
from ..sampling.row import SamplingRow
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Tokens that may come next.

    Attributes:
        token_ids: each behind the one that it follows.
        tree: which follows which.
        probabilities: of the distributions that they were drawn from, float32 [tokens, vocab]; None
            where each was certain.
    """

    token_ids: tuple[int, ...]
    tree: Tree
    probabilities: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What a step has found out about a row.

    Attributes:
        hidden: [tokens, hidden], what the model made of the row's tokens and of the accepted ones, as its
            vocabulary projection reads it; beside it what the proposer's `aux_hidden_state_layers` ask for.
        next_ids: the token behind each of them.
    """

    row: ScheduledRow
    hidden: torch.Tensor
    next_ids: Sequence[int]

    @property
    def place(self) -> tuple[str, int]:
        """The sequence, and how many of its tokens are computed now."""
        return self.row.sequence_id, self.row.start + len(self.next_ids)


SamplingRowOf = Callable[[ScheduledRow, Sequence[int]], SamplingRow]
"""How the token behind a row and some draft tokens is drawn."""


class Proposer(Protocol):
    """Proposes draft tokens for the rows of a step that have slots for some."""

    @property
    def bytes_held(self) -> int:
        """Bytes of weights and cache that it keeps."""
        ...

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Layers of the model whose input it wants to see beside the final hidden states."""
        ...

    @property
    def caches(self) -> tuple[KvCache, ...]:
        """Its own, in which a sequence has the blocks that it has in the model's."""
        ...

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """Draft tokens by sequence, at most `num_draft_tokens` of its row, and none for rows without."""
        ...

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """What came out of the step, row by row."""
        ...
