"""Sampling rows: parameters, seed and history of each token to sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..base.sampling_params import SamplingParams
from ..scheduling.step_plan import ScheduledRow


class SamplingRow(NamedTuple):
    """One token to sample. A named tuple, because every step builds one per row.

    Attributes:
        params: the request's sampling parameters.
        seed: of this completion.
        known: token ids so far, prompt first.
        num_prompt_tokens: length of the prompt within `known`.
        suppressed_ids: token ids masked out at this position (EOS and stop ids before `min_tokens`).
        stop_ids: EOS and stop token ids; set only with a token mask, which may allow no other token.
        draft_ids: draft tokens after the known ones.
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
        """All token ids before the one to sample."""
        return [*self.known, *self.draft_ids] if self.draft_ids else self.known

    @property
    def position(self) -> int:
        """Position of the token to sample."""
        return len(self.known) + len(self.draft_ids)


def sampling_row(
    row: ScheduledRow,
    eos_token_ids: frozenset[int],
    draft_ids: Sequence[int] = (),
    sample: int = 0,
) -> SamplingRow:
    """The sampling row of the token after a row and some draft tokens, for one of its `n` samples."""
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
    """A sampling row for each of the row's samples."""
    return [sampling_row(row, eos_token_ids, sample=i) for i in range(row.num_samples)]
