"""The plan of a step: immutable data, which the scheduler decides and the model runner carries out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..base.sampling_params import SamplingParams
from .token_view import TokenView


class ScheduledRow(NamedTuple):
    """A run of tokens of one sequence. Every step makes one for every sequence, so it is a tuple.

    Attributes:
        sequence_id: whose they are.
        start, end: positions of the first one and behind the last; those before are in the KV cache.
        tokens: of the sequence, as the scheduler knew them: an output placeholder stands last in it where
            the step before draws a token.
        block_ids: the blocks of the sequence from position 0 on, wide enough for these tokens.
        num_samples: tokens to draw after the last one; 0 where the known tokens are not exhausted.
        num_prompt_tokens: how many of `tokens` are prompt.
        params, seed: how to draw.
        lora: the adapter that computes them, if any.
        num_draft_tokens: tokens behind `end` for which there are slots, should somebody propose them.
    """

    sequence_id: str
    start: int
    end: int
    tokens: TokenView
    block_ids: tuple[int, ...]
    num_samples: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    lora: str | None = None
    num_draft_tokens: int = 0

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens to compute, perhaps an output placeholder last."""
        return self.tokens[self.start : self.end]

    @property
    def history(self) -> TokenView:
        """All tokens before the one that this step draws."""
        return self.tokens.first(self.end)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def has_placeholder(self) -> bool:
        """Whether its last token is still being drawn."""
        return self.tokens.has_placeholder and self.end == len(self.tokens)

    @property
    def draws_one(self) -> bool:
        """Whether exactly one token comes of it, so that the next step can be scheduled meanwhile."""
        return self.num_samples == 1 and not self.num_draft_tokens

    def resolved(self, drawn: Mapping[str, Sequence[int]]) -> ScheduledRow:
        """The row with the token that the step before drew in place of the placeholder."""
        if not self.tokens.has_placeholder:
            return self
        return self._replace(tokens=self.tokens.resolved(drawn[self.sequence_id][0]))


Copies = tuple[tuple[int, int], ...]
"""Whole blocks, (source, destination)."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """What is copied before a step computes, in this order.

    Attributes:
        within: for sequences that forked.
        to_host: of sequences that were preempted.
        from_host: of those that go on.
    """

    within: Copies = ()
    to_host: Copies = ()
    from_host: Copies = ()

    def __bool__(self) -> bool:
        return bool(self.within or self.to_host or self.from_host)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows to compute, after copying blocks."""

    rows: tuple[ScheduledRow, ...]
    copies: BlockCopies = BlockCopies()

    @property
    def blocks_next_step(self) -> bool:
        """Whether where the next step begins depends on what this one draws."""
        return any(row.num_samples and not row.draws_one for row in self.rows)

    @property
    def has_placeholders(self) -> bool:
        """Whether it has to be told what the step before draws."""
        return any(row.tokens.has_placeholder for row in self.rows)

    def resolved(self, drawn: Mapping[str, Sequence[int]]) -> StepPlan:
        """The same plan, with what the step before drew, by sequence, in place of the placeholders."""
        return StepPlan(tuple(row.resolved(drawn) for row in self.rows), self.copies)

    @property
    def num_tokens_of(self) -> dict[str, int]:
        """Tokens that each sequence computes in this step."""
        return {row.sequence_id: row.num_tokens for row in self.rows}

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
