"""Speculative rows: a scheduled row with its draft tokens and those accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..base.transfer import packed
from ..cache.step_inputs import Run
from ..scheduling.step_plan import ScheduledRow
from ..speculation.proposer import DraftTokens


@dataclass(slots=True)
class SpeculativeRow:
    """A row followed by its draft tokens.

    Attributes:
        first: index of the first draft token in the step.
        accepted: indices of the accepted draft tokens, from the root of the tree.
    """

    row: ScheduledRow
    draft: DraftTokens
    first: int
    accepted: list[int] = field(default_factory=list)

    @property
    def run(self) -> Run:
        row, draft = self.row, self.draft
        return Run(
            row.start,
            [*row.token_ids, *draft.token_ids],
            row.block_ids,
            draft.tree,
            rope_positions=row.rope_positions,
            images=row.images,
            bidirectional_images=row.bidirectional_images,
        )

    @property
    def path(self) -> list[int]:
        """The accepted token ids."""
        return [self.draft.token_ids[index] for index in self.accepted]

    def accept(self, token_id: int) -> bool:
        """Accept the child in the tree that is the sampled `token_id`; False if there is none."""
        parent = self.accepted[-1] if self.accepted else -1
        child_index = self.draft.tree.child(parent, token_id, self.draft.token_ids)
        if child_index is not None:
            self.accepted.append(child_index)
        return child_index is not None

    def moved_slots(self, block_size: int) -> list[tuple[int, int]]:
        """KV slots to compact: (source, target) of the accepted tokens of a tree."""
        end, blocks = self.row.end, self.row.block_ids
        places = [(end + index, to) for to, index in enumerate(self.accepted, end)]
        slots = [[blocks[p // block_size] * block_size + p % block_size for p in q] for q in places]
        return [(source, target) for source, target in slots if source != target]

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of `hidden` [tokens, hidden] of its tokens and the accepted draft tokens."""
        begin = self.first - self.row.num_tokens
        if self.accepted == list(range(len(self.accepted))):
            return hidden[begin : self.first + len(self.accepted)]
        known = torch.arange(begin, self.first, device=hidden.device)
        accepted = packed([self.accepted], hidden.device)[0] + self.first
        return hidden.index_select(0, torch.cat([known, accepted]))
