"""Where the rows of a step lie among its tokens."""

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
    """Where the tokens of each row lie in a step, one row behind the other.

    Attributes:
        begins: of each row's first token.
        runs: the tokens of each row, and its draft tokens.
        speculative: the rows that have draft tokens, by sequence.
    """

    rows: Sequence[ScheduledRow]
    begins: Sequence[int]
    runs: Sequence[Run]
    speculative: Mapping[str, SpeculativeRow]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], drafts: Mapping[str, DraftTokens]) -> StepLayout:
        """Rows, those that are in `drafts` with draft tokens behind them."""
        begins: list[int] = []
        runs: list[Run] = []
        speculative: dict[str, SpeculativeRow] = {}
        begin = 0
        for row in rows:
            run = Run(row.start, row.token_ids, row.block_ids)
            draft = drafts.get(row.sequence_id)
            if draft is not None:
                one = SpeculativeRow(row, draft, begin + row.num_tokens)
                speculative[row.sequence_id], run = one, one.run
            begins.append(begin)
            runs.append(run)
            begin += len(run.token_ids)
        return cls(rows, begins, runs, speculative)

    @property
    def drawing(self) -> list[ScheduledRow]:
        """The rows of which something is drawn."""
        return [row for row in self.rows if row.num_samples]

    @property
    def placeholders(self) -> dict[str, int]:
        """Where the tokens lie that are still being drawn, by sequence."""
        placed = zip(self.rows, self.begins, strict=True)
        return {
            row.sequence_id: begin + row.num_tokens - 1
            for row, begin in placed
            if row.has_placeholder
        }

    @property
    def ends(self) -> list[int]:
        """The tokens behind which something is drawn, once for each draw, and behind each draft token."""
        ends: list[int] = []
        for row, begin in zip(self.rows, self.begins, strict=True):
            last = begin + row.num_tokens - 1
            ends += [last] * row.num_samples
            if (one := self.speculative.get(row.sequence_id)) is not None:
                ends += range(one.first, one.first + len(one.draft.token_ids))
        return ends

    def target_states(self, hidden: torch.Tensor, result: StepResult) -> list[TargetStates]:
        """What the step found out about its rows; it gave `hidden` [tokens, hidden] and drew `result`."""
        found: list[TargetStates] = []
        for row, begin in zip(self.rows, self.begins, strict=True):
            drawn = result.tokens.get(row.sequence_id) or [row.tokens[row.end]]
            behind = row.tokens[row.start + 1 : row.end]
            if (one := self.speculative.get(row.sequence_id)) is not None:
                found.append(TargetStates(row, one.states(hidden), [*behind, *drawn]))
            else:
                own = hidden[begin : begin + row.num_tokens]
                found.append(TargetStates(row, own, [*behind, drawn[0]]))
        return found
