"""What a draw looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One draw.

    Attributes:
        params: how to draw.
        seed: of this completion.
        known: tokens so far, prompt first.
        num_prompt_tokens: how many of them are prompt.
        barred: tokens that must not come now (what would end a sequence that is too short to end).
        endings: tokens that end the sequence; given with a token mask, which may leave nothing else.
        guessed: tokens behind the known ones that may come.
    """

    params: SamplingParams
    seed: int
    known: Sequence[int]
    num_prompt_tokens: int
    barred: frozenset[int] = frozenset()
    endings: frozenset[int] = frozenset()
    guessed: Sequence[int] = ()

    @property
    def history(self) -> Sequence[int]:
        """All tokens before the one to draw."""
        return [*self.known, *self.guessed] if self.guessed else self.known

    @property
    def position(self) -> int:
        """Of the token to draw."""
        return len(self.known) + len(self.guessed)
