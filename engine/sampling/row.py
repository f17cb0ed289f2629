"""What a draw looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..base.sampling_params import SamplingParams
from ..scheduling.step_plan import ScheduledRow


class SamplingRow(NamedTuple):
    """One draw. Every step makes one for every row, so it is a tuple.

    Attributes:
        params: how to draw.
        seed: of this completion.
        known: tokens so far, prompt first.
        num_prompt_tokens: how many of them are prompt.
        suppressed_ids: tokens that must not come now (what would end a sequence that is too short to end).
        stop_ids: tokens that end the sequence; given with a token mask, which may leave nothing else.
        draft_ids: draft tokens behind the known ones.
    """

    params: SamplingParams
    seed: int
    known: Sequence[int]
    num_prompt_tokens: int
    suppressed_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    draft_ids: Sequence[int] = ()

    @property
    def history(self) -> Sequence[int]:
        """All tokens before the one to draw."""
        return [*self.known, *self.draft_ids] if self.draft_ids else self.known

    @property
    def position(self) -> int:
        """Of the token to draw."""
        return len(self.known) + len(self.draft_ids)


def sampling_row(
    row: ScheduledRow,
    eos_token_ids: frozenset[int],
    draft_ids: Sequence[int] = (),
    sample: int = 0,
) -> SamplingRow:
    """How the token behind a row and some draft tokens is drawn, for one of its samples."""
    params = row.params
    num_output = row.end + len(draft_ids) - row.num_prompt_tokens
    suppressed: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()
    if num_output < params.min_tokens:
        suppressed = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            suppressed |= eos_token_ids
    if params.token_mask is not None:
        stop = eos_token_ids.union(params.stop_token_ids)
    seed, known = row.seed + sample, row.history
    return SamplingRow(params, seed, known, row.num_prompt_tokens, suppressed, stop, draft_ids)


def sampling_rows(row: ScheduledRow, eos_token_ids: frozenset[int]) -> list[SamplingRow]:
    """One for each of the row's samples."""
    return [sampling_row(row, eos_token_ids, sample=i) for i in range(row.num_samples)]
