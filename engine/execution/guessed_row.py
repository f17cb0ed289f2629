"""A row of a step with its guesses, from the tokens to compute to what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..cache.step_inputs import Run
from ..scheduling.outputs import TokenLogprobs
from ..scheduling.step_plan import ScheduledRow
from ..speculation.proposer import Guesses, Seen


@dataclass(slots=True)
class GuessedRow:
    """A row of a step with its guesses, and what became of them.

    Attributes:
        begin: where its tokens lie in the step.
        kept: the guesses that stand, from the first place on.
        drawn, scored: the tokens that came of it, and their logprobs.
    """

    row: ScheduledRow
    begin: int
    guesses: Guesses | None
    kept: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    scored: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def guessed(self) -> tuple[int, ...]:
        return () if self.guesses is None else self.guesses.token_ids

    @property
    def num_tokens(self) -> int:
        return self.row.num_tokens + len(self.guessed)

    @property
    def run(self) -> Run:
        row = self.row
        if self.guesses is None:
            return Run(row.start, row.token_ids, row.block_ids)
        return Run(row.start, [*row.token_ids, *self.guessed], row.block_ids, self.guesses.tree)

    @property
    def ends(self) -> list[int]:
        """Where the tokens lie in the step behind which something is drawn, once for each draw."""
        last = self.begin + self.row.num_tokens - 1
        return [last] * self.row.num_samples + [last + 1 + i for i in range(len(self.guessed))]

    @property
    def path(self) -> list[int]:
        """The tokens of the guesses that stand."""
        return [self.guessed[index] for index in self.kept]

    def follow(self) -> bool:
        """Go on to the guess that is what was drawn last; False where there is none."""
        if self.guesses is None:
            return False
        at = self.kept[-1] if self.kept else -1
        found = self.guesses.tree.child(at, self.drawn[-1], self.guessed)
        if found is not None:
            self.kept.append(found)
        return found is not None

    def moves(self) -> list[tuple[int, int]]:
        """Slots of the sequence from and to which the guesses that stand must go."""
        pairs = enumerate(self.kept, self.row.end)
        return [(self.row.end + index, to) for to, index in pairs if self.row.end + index != to]

    def seen(self, hidden: torch.Tensor) -> Seen:
        """What the step, which gave `hidden` [tokens, hidden], found out about it."""
        row, end = self.row, self.begin + self.row.num_tokens
        if self.moves():
            known = torch.arange(self.begin, end, device=hidden.device)
            kept = torch.tensor(self.kept, device=hidden.device) + end
            own = hidden.index_select(0, torch.cat([known, kept]))
        else:
            own = hidden[self.begin : end + len(self.kept)]
        behind = row.tokens[row.start + 1 : row.end]
        if row.num_samples:
            return Seen(row, own, [*behind, *self.drawn[: len(self.kept) + 1]])
        return Seen(row, own, [*behind, row.tokens[row.end]])
