"""Draft-token proposers: their interface, the draft tokens, the target states that they read."""

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
    """Draft tokens of one row.

    Attributes:
        token_ids: in tree order: each after its parent.
        tree: the parent of each draft token.
        probabilities: the draft distributions q that they were sampled from, float32 [tokens, vocab]; None
            where the proposal is deterministic.
    """

    token_ids: tuple[int, ...]
    tree: Tree
    probabilities: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Target hidden states of a row after a step, and the next token ids.

    Attributes:
        hidden: [tokens, hidden], final hidden states of the row's tokens and of the accepted draft tokens,
            as the LM head reads them; concatenated to them those of the proposer's
            `aux_hidden_state_layers`.
        next_ids: the token after each of them.
    """

    row: ScheduledRow
    hidden: torch.Tensor
    next_ids: Sequence[int]

    @property
    def place(self) -> tuple[str, int]:
        """The sequence id, and its number of computed tokens after the step."""
        return self.row.sequence_id, self.row.start + len(self.next_ids)


SamplingRowOf = Callable[[ScheduledRow, Sequence[int]], SamplingRow]
"""The sampling parameters of the token after a row and some draft tokens."""


class Proposer(Protocol):
    """Proposes draft tokens for the rows of a step that have slots for some."""

    @property
    def bytes_held(self) -> int:
        """Bytes of the proposer's weights and KV cache."""
        ...

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Target layers whose input it reads beside the final hidden states (EAGLE-3)."""
        ...

    @property
    def caches(self) -> tuple[KvCache, ...]:
        """The proposer's KV caches, addressed by the target's block ids."""
        ...

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """Draft tokens by sequence id, at most the row's `num_draft_tokens`; no entry for rows without."""
        ...

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """Take the target states of a step's rows, before the next `propose`."""
        ...
