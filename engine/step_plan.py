"""What one step of the engine computes. The scheduler decides it, the model runner carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A run of tokens of one sequence.

    Attributes:
        sequence_id: whose they are.
        start: position of the first one; everything before it is in the KV cache.
        token_ids: the tokens to compute.
        block_ids: the blocks of the sequence from position 0 on, wide enough for these tokens.
        num_samples: tokens to draw after the last one; 0 where the known tokens are not exhausted.
        history: all known tokens of the sequence, for penalties.
        num_prompt_tokens: how many of `history` are prompt.
        params, seed: how to draw.
        lora: the adapter that computes them, if any.
        num_guesses: tokens behind `token_ids` for which there are slots, should somebody guess them.
    """

    sequence_id: str
    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    num_samples: int
    history: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    lora: str | None = None
    num_guesses: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Tokens in the KV cache once the step is done."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows to compute, after copying blocks (source, destination) for sequences that forked."""

    rows: tuple[ScheduledRow, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens_of(self) -> dict[str, int]:
        """Tokens that each sequence computes in this step."""
        return {row.sequence_id: row.num_tokens for row in self.rows}

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
