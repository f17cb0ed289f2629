"""A row with draft tokens, from the tokens to compute to those that are accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..cache.step_inputs import Run
from ..scheduling.step_plan import ScheduledRow
from ..speculation.proposer import DraftTokens


@dataclass(slots=True)
class SpeculativeRow:
    """A row with draft tokens behind it.

    Attributes:
        first: where the first draft token lies in the step.
        accepted: the draft tokens that are accepted, by their numbers, from the first place on.
    """

    row: ScheduledRow
    draft: DraftTokens
    first: int
    accepted: list[int] = field(default_factory=list)

    @property
    def run(self) -> Run:
        row, draft = self.row, self.draft
        return Run(row.start, [*row.token_ids, *draft.token_ids], row.block_ids, draft.tree)

    @property
    def path(self) -> list[int]:
        """The tokens that are accepted."""
        return [self.draft.token_ids[index] for index in self.accepted]

    def accept(self, token_id: int) -> bool:
        """Go on to the draft token that is the one drawn last; False where there is none."""
        at = self.accepted[-1] if self.accepted else -1
        child_index = self.draft.tree.child(at, token_id, self.draft.token_ids)
        if child_index is not None:
            self.accepted.append(child_index)
        return child_index is not None

    def moved_slots(self, block_size: int) -> list[tuple[int, int]]:
        """Slots of the cache from and to which accepted tokens of a tree must go."""
        end, blocks = self.row.end, self.row.block_ids
        places = [(end + index, to) for to, index in enumerate(self.accepted, end)]
        slots = [[blocks[p // block_size] * block_size + p % block_size for p in q] for q in places]
        return [(source, target) for source, target in slots if source != target]

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of `hidden` [tokens, hidden] of its tokens and those accepted."""
        begin = self.first - self.row.num_tokens
        if self.accepted == list(range(len(self.accepted))):
            return hidden[begin : self.first + len(self.accepted)]
        known = torch.arange(begin, self.first, device=hidden.device)
        accepted = torch.tensor(self.accepted, device=hidden.device) + self.first
        return hidden.index_select(0, torch.cat([known, accepted]))
