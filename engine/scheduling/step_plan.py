"""Step plans: immutable data from the scheduler to the model runner (vLLM's `SchedulerOutput`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, overload

from ..base.image_input import NO_IMAGES, Images
from ..base.sampling_params import PoolingParams, SamplingParams
from .block_pool import NULL_BLOCK
from .request import NULL_SLOT, OUTPUT_PLACEHOLDER, Request, RopePositions, TokenView


class ScheduledRow(NamedTuple):
    """Scheduled tokens of one sequence. A tuple, because every step makes one per sequence.

    Attributes:
        start, end: range of positions to compute, `end` exclusive; those before are in the KV cache.
        tokens: the sequence's tokens, known when it was scheduled; the last is an output placeholder if
            the previous step samples it.
        block_ids: the sequence's block table, from position 0 up to `end` at least.
        num_samples: tokens to sample after the last one; 0 while known tokens remain to be computed.
        lora: name of the adapter, if any.
        num_draft_tokens: slots reserved after `end` for draft tokens.
        state_slot: slot of the sequence's constant state, which starts empty at position 0.
        checkpoint: state slot into which the state after `end` is copied; the null slot: none.
        pooling: rule for pooling the hidden states, if any; nothing is sampled then.
        num_evicted: tokens before `start` that were evicted to a KV-cache budget: the slot of a token is its
            position less these.
        num_scored: last tokens of the row whose attention weights count in the next compaction.
        compacts: the sequence is compacted before its next step.
        images: images of the sequence's prompt.
    """

    sequence_id: str
    start: int
    end: int
    tokens: TokenView
    block_ids: tuple[int, ...]
    num_samples: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    lora: str | None = None
    num_draft_tokens: int = 0
    state_slot: int = NULL_SLOT
    checkpoint: int = NULL_SLOT
    pooling: PoolingParams | None = None
    num_evicted: int = 0
    num_scored: int = 0
    compacts: bool = False
    images: Images = NO_IMAGES
    rope_positions: RopePositions | None = None
    bidirectional_images: tuple[range, ...] = ()

    @property
    def token_ids(self) -> Sequence[int]:
        return self.tokens[self.start : self.end]

    @property
    def history(self) -> TokenView:
        return self.tokens.first(self.end)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def has_placeholder(self) -> bool:
        return self.tokens.has_placeholder and self.end == len(self.tokens)

    @property
    def samples_one(self) -> bool:
        return self.num_samples == 1 and not self.num_draft_tokens

    @property
    def is_decode(self) -> bool:
        """True if it is one token of text, which samples one, of a sequence with all its blocks."""
        return (
            self.num_samples == 1
            and self.num_tokens == 1
            and not (self.num_draft_tokens or self.num_evicted or self.images)
            and self.rope_positions is None
        )

    @property
    def takes_largest(self) -> bool:
        """True if the argmax of its logits, and of those of later tokens, is all that is sampled of them."""
        params, num_output = self.params, self.end - self.num_prompt_tokens
        suppresses = params.stop_token_ids or not params.ignore_eos
        return (
            params.is_greedy
            and not params.changes_scores
            and params.logprobs is None
            and not (suppresses and num_output < params.min_tokens)
        )

    def needs_image(self, content_hash: bytes) -> bool:
        return any(
            image.content_hash == content_hash and image.overlaps(self.start, self.end)
            for image in self.images
        )

    def resolved(self, sampled: Mapping[str, Sequence[int]]) -> ScheduledRow:
        """The row with the token that the previous step sampled in place of the placeholder."""
        if not self.tokens.has_placeholder:
            return self
        return self._replace(tokens=self.tokens.resolved(sampled[self.sequence_id][0]))


def scheduled_row(request: Request, num_new: int, num_draft_tokens: int) -> ScheduledRow:
    """The row of the next `num_new` tokens of a sequence, which samples if it computes the last known one."""
    end = request.num_computed_tokens + num_new
    samples = end == request.num_tokens and request.pooling is None
    return ScheduledRow(
        sequence_id=request.sequence_id,
        start=request.num_computed_tokens,
        end=end,
        tokens=request.view(),
        block_ids=tuple(request.block_ids),
        num_samples=request.num_completions if samples else 0,
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        seed=request.seed,
        lora=request.lora,
        num_draft_tokens=num_draft_tokens,
        state_slot=request.state_slot,
        pooling=request.pooling,
        images=request.images,
        rope_positions=request.rope_positions,
        bidirectional_images=request.bidirectional_images,
    )


def is_plain_decode(row: ScheduledRow) -> bool:
    """True if a row is one token of text, which samples one, of a sequence that has all its blocks."""
    return (
        row.num_samples == 1
        and row.end - row.start == 1
        and not row.num_evicted
        and NULL_BLOCK not in row.block_ids
        and row.rope_positions is None
        and all(image.end <= row.start for image in row.images)
    )


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """The constant part of consecutive decode steps: first `rows`, and the block tables, which only grow."""

    rows: tuple[ScheduledRow, ...]
    tables: tuple[Sequence[int], ...]
    block_size: int

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(row.sequence_id for row in self.rows)

    @cached_property
    def places(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(row.start for row in self.rows)

    @cached_property
    def has_adapters(self) -> bool:
        return any(row.lora for row in self.rows)

    @cached_property
    def takes_largest(self) -> bool:
        return all(row.takes_largest for row in self.rows)

    @cached_property
    def reads_tokens(self) -> bool:
        return any(row.params.reads_tokens for row in self.rows)

    def beginning(self, step: int) -> Sequence[int]:
        """Rows whose token is the first of a block, in the step that is `step` after the first."""
        return self._beginning[step % self.block_size]

    @cached_property
    def _beginning(self) -> list[list[int]]:
        beginning: list[list[int]] = [[] for _ in range(self.block_size)]
        for row, start in enumerate(self.starts):
            beginning[-start % self.block_size].append(row)
        return beginning


class DecodeRows(Sequence[ScheduledRow]):
    """The rows of the step `step` after the first of a batch, made when read: a step in place needs none."""

    __slots__ = ("_made", "_sampled", "batch", "has_placeholders", "step")

    def __init__(
        self,
        batch: DecodeBatch,
        step: int,
        *,
        has_placeholders: bool,
        sampled: Sequence[int] | None = None,
    ) -> None:
        self.batch, self.step = batch, step
        self.has_placeholders = has_placeholders
        self._sampled = sampled
        self._made: tuple[ScheduledRow, ...] | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """The token of each row; of a step without placeholders."""
        if self._sampled is not None:
            return self._sampled
        return [row.tokens.booked[row.start + self.step] for row in self.batch.rows]

    def resolved(self, sampled: Mapping[str, Sequence[int]]) -> DecodeRows:
        tokens = [sampled[name][0] for name in self.batch.names]
        return DecodeRows(self.batch, self.step, has_placeholders=False, sampled=tokens)

    def __len__(self) -> int:
        return len(self.batch.rows)

    @overload
    def __getitem__(self, index: int) -> ScheduledRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScheduledRow, ...]: ...
    def __getitem__(self, index: int | slice) -> ScheduledRow | tuple[ScheduledRow, ...]:
        return self._all[index]

    def __iter__(self) -> Iterator[ScheduledRow]:
        return iter(self._all)

    @property
    def _all(self) -> tuple[ScheduledRow, ...]:
        if self._made is None:
            self._made = tuple(self._row(row) for row in range(len(self)))
        return self._made

    def _row(self, index: int) -> ScheduledRow:
        row = self.batch.rows[index]
        start, booked = row.start + self.step, row.tokens.booked
        if self._sampled is not None:
            tokens = TokenView(booked, start, self._sampled[index])
        elif self.has_placeholders:
            tokens = TokenView(booked, start, OUTPUT_PLACEHOLDER)
        else:
            tokens = TokenView(booked, start + 1)
        num_blocks = start // self.batch.block_size + 1
        block_ids = tuple(self.batch.tables[index][:num_blocks])
        return row._replace(start=start, end=start + 1, tokens=tokens, block_ids=block_ids)


Copies = tuple[tuple[int, int], ...]
"""Block copies, (source, destination)."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Block copies before a forward pass: within (forks), to the host, from it, and of state slots."""

    within: Copies = ()
    to_host: Copies = ()
    from_host: Copies = ()
    states: Copies = ()

    def __bool__(self) -> bool:
        return bool(self.within or self.to_host or self.from_host or self.states)


class Compaction(NamedTuple):
    """Compaction of a sequence: in every layer each KV head keeps `num_kept` of its tokens.

    Attributes:
        destination: the block table after; some of its blocks may be in `source`.
    """

    sequence_id: str
    source: tuple[int, ...]
    num_slots: int
    destination: tuple[int, ...]
    num_kept: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows to compute, after compacting sequences one by one and copying blocks."""

    rows: tuple[ScheduledRow, ...] | DecodeRows
    copies: BlockCopies = BlockCopies()
    compactions: tuple[Compaction, ...] = ()

    @property
    def blocks_next_step(self) -> bool:
        """True if the next step's positions or slots depend on this one: it is not scheduled before."""
        if isinstance(self.rows, DecodeRows):
            return False
        return any(row.compacts or (row.num_samples and not row.samples_one) for row in self.rows)

    @property
    def has_placeholders(self) -> bool:
        if isinstance(self.rows, DecodeRows):
            return self.rows.has_placeholders
        return any(row.tokens.has_placeholder for row in self.rows)

    def resolved(self, sampled: Mapping[str, Sequence[int]]) -> StepPlan:
        if isinstance(self.rows, DecodeRows):
            return replace(self, rows=self.rows.resolved(sampled))
        return replace(self, rows=tuple(row.resolved(sampled) for row in self.rows))

    @property
    def sequence_ids(self) -> Sequence[str]:
        if isinstance(self.rows, DecodeRows):
            return self.rows.batch.names
        return [row.sequence_id for row in self.rows]

    @property
    def checkpoints(self) -> Copies:
        """Copies of states after the forward pass, (slot of a sequence, slot of its checkpoint)."""
        return tuple((row.state_slot, row.checkpoint) for row in self.rows if row.checkpoint)

    @property
    def num_tokens(self) -> int:
        if isinstance(self.rows, DecodeRows):
            return len(self.rows)
        return sum(row.num_tokens for row in self.rows)
