"""Layout of a step's batch: the offsets of each row's tokens, draft tokens and logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..cache.step_inputs import Run
from ..scheduling.step_plan import ScheduledRow
from ..speculation.proposer import DraftTokens, TargetStates
from .speculative_row import SpeculativeRow
from .step_result import StepResult


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Offsets of the rows in the flattened tokens of a step.

    Attributes:
        begins: of each row's first token.
        runs: the tokens of each row, with its draft tokens.
        speculative: the rows that have draft tokens, by sequence.
    """

    rows: Sequence[ScheduledRow]
    begins: Sequence[int]
    runs: Sequence[Run]
    speculative: Mapping[str, SpeculativeRow]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], drafts: Mapping[str, DraftTokens]) -> StepLayout:
        """The layout of `rows`, those of `drafts` followed by their draft tokens."""
        begins: list[int] = []
        runs: list[Run] = []
        speculative: dict[str, SpeculativeRow] = {}
        begin = 0
        for row in rows:
            run = Run(
                row.start - row.num_evicted,
                row.token_ids,
                row.block_ids,
                state_slot=row.state_slot,
                num_evicted=row.num_evicted,
                images=row.images,
                rope_positions=row.rope_positions,
                bidirectional_images=row.bidirectional_images,
            )
            draft = drafts.get(row.sequence_id)
            if draft is not None:
                verified = SpeculativeRow(row, draft, begin + row.num_tokens)
                speculative[row.sequence_id], run = verified, verified.run
            begins.append(begin)
            runs.append(run)
            begin += len(run.token_ids)
        return cls(rows, begins, runs, speculative)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, draft tokens included."""
        return self.begins[-1] + len(self.runs[-1].token_ids) if self.runs else 0

    @property
    def sampled_rows(self) -> list[ScheduledRow]:
        """The rows that sample."""
        return [row for row in self.rows if row.num_samples]

    @property
    def placeholders(self) -> dict[str, int]:
        """Indices of output placeholders, by sequence."""
        placed = zip(self.rows, self.begins, strict=True)
        return {
            row.sequence_id: begin + row.num_tokens - 1
            for row, begin in placed
            if row.has_placeholder
        }

    @property
    def ends(self) -> list[int]:
        """Indices of the tokens whose logits are needed: once per sample, and once per draft token."""
        ends: list[int] = []
        for row, begin in zip(self.rows, self.begins, strict=True):
            last = begin + row.num_tokens - 1
            ends += [last] * row.num_samples
            if (verified := self.speculative.get(row.sequence_id)) is not None:
                ends += range(verified.first, verified.first + len(verified.draft.token_ids))
        return ends

    def target_states(self, hidden: torch.Tensor, result: StepResult) -> list[TargetStates]:
        """Target hidden states and next token ids of the rows that generate, of `hidden` [tokens, hidden] and
        `result`."""
        states: list[TargetStates] = []
        for row, begin in zip(self.rows, self.begins, strict=True):
            if row.pooling is not None:
                continue
            sampled = result.tokens.get(row.sequence_id) or [row.tokens[row.end]]
            following = row.tokens[row.start + 1 : row.end]
            if (verified := self.speculative.get(row.sequence_id)) is not None:
                states.append(TargetStates(row, verified.states(hidden), [*following, *sampled]))
            else:
                row_hidden = hidden[begin : begin + row.num_tokens]
                states.append(TargetStates(row, row_hidden, [*following, sampled[0]]))
        return states
