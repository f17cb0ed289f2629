"""What one step of the engine computes. The scheduler decides it, the model runner carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload

from ..base.sampling_params import SamplingParams

PROMISED = -1
"""In the place of a token that a step under way will draw."""


class Prefix(Sequence[int]):
    """The first `length` of `tokens`, which others lengthen: a view, because sequences are long."""

    __slots__ = ("_length", "tokens")

    def __init__(self, tokens: Sequence[int], length: int) -> None:
        self.tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self.tokens, self._length)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self.tokens[slice(*index.indices(self._length))]
        return self.tokens[range(self._length)[index]]


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A run of tokens of one sequence.

    Attributes:
        sequence_id: whose they are.
        start, end: positions of the first one and behind the last; those before are in the KV cache.
        tokens: the sequence's own list. A token that the step before draws is known in it when this step
            runs, unless that looks for it on the device; and the place behind `end` is kept for the one
            that this step draws, if it `promises` one.
        block_ids: the blocks of the sequence from position 0 on, wide enough for these tokens.
        num_samples: tokens to draw after the last one; 0 where the known tokens are not exhausted.
        num_prompt_tokens: how many of `tokens` are prompt.
        params, seed: how to draw.
        lora: the adapter that computes them, if any.
        num_guesses: tokens behind `end` for which there are slots, should somebody guess them.
    """

    sequence_id: str
    start: int
    end: int
    tokens: list[int]
    block_ids: Sequence[int]
    num_samples: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    lora: str | None = None
    num_guesses: int = 0

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens to compute."""
        return self.tokens[self.start : self.end]

    @property
    def history(self) -> Sequence[int]:
        """All tokens before the one that this step draws."""
        return Prefix(self.tokens, self.end)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_unknown(self) -> bool:
        """Whether its last token is still being drawn."""
        return self.tokens[self.end - 1] == PROMISED

    @property
    def promises(self) -> bool:
        """Whether exactly one token comes of it, so that the next step can be scheduled meanwhile."""
        return self.num_samples == 1 and not self.num_guesses


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
    def decides_next(self) -> bool:
        """Whether where the next step begins depends on what this one draws."""
        return any(row.num_samples and not row.promises for row in self.rows)

    def keep(self, drawn: Mapping[str, Sequence[int]]) -> None:
        """Put the tokens that were promised in their places; a second time changes nothing."""
        for row in self.rows:
            if row.promises:
                row.tokens[row.end] = drawn[row.sequence_id][0]

    @property
    def num_tokens_of(self) -> dict[str, int]:
        """Tokens that each sequence computes in this step."""
        return {row.sequence_id: row.num_tokens for row in self.rows}

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
