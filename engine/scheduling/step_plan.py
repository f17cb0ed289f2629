"""Step plans: immutable data from the scheduler to the model runner (vLLM's `SchedulerOutput`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..base.image_input import NO_IMAGES, Images
from ..base.pooling_params import PoolingParams
from ..base.sampling_params import SamplingParams
from .request import NULL_SLOT, Request
from .rope_positions import RopePositions
from .token_view import TokenView


class ScheduledRow(NamedTuple):
    """Scheduled tokens of one sequence. A tuple, because every step makes one per sequence.

    Attributes:
        sequence_id: of the sequence.
        start, end: range of positions to compute, `end` exclusive; those before are in the KV cache.
        tokens: of the sequence, known when it was scheduled; the last is an output placeholder if the
            previous step samples it.
        block_ids: the sequence's block table, from position 0 up to `end` at least.
        num_samples: tokens to sample after the last one; 0 while known tokens remain to be computed.
        num_prompt_tokens: how many of `tokens` are prompt.
        params, seed: for sampling.
        lora: name of the adapter, if any.
        num_draft_tokens: slots reserved after `end` for draft tokens.
        state_slot: of the sequence's constant state, which starts from nothing at position 0.
        checkpoint: state slot into which the state after `end` is copied; the null slot: none.
        pooling: how the hidden states are pooled, if they are; nothing is sampled then.
        num_evicted: tokens before `start` that were evicted to a KV-cache budget: the slot of a token is its
            position less these.
        num_scored: last tokens of the row whose attention weights count in the next compaction.
        compacts: the sequence is compacted before its next step.
        images: of the sequence's prompt.
        rope_positions, bidirectional_images: of the sequence.
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
        """The tokens to compute; the last may be an output placeholder."""
        return self.tokens[self.start : self.end]

    @property
    def history(self) -> TokenView:
        """All tokens before the one that this step samples."""
        return self.tokens.first(self.end)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def has_placeholder(self) -> bool:
        """Whether its last token is an output placeholder."""
        return self.tokens.has_placeholder and self.end == len(self.tokens)

    @property
    def samples_one(self) -> bool:
        """Whether it yields exactly one token, so that the next step can be scheduled asynchronously."""
        return self.num_samples == 1 and not self.num_draft_tokens

    def needs_image(self, content_hash: bytes) -> bool:
        """Whether some of its tokens are of that image."""
        return any(
            image.content_hash == content_hash and image.overlaps(self.start, self.end)
            for image in self.images
        )

    def resolved(self, sampled: Mapping[str, Sequence[int]]) -> ScheduledRow:
        """The row with the token that the previous step sampled in place of the placeholder."""
        if not self.tokens.has_placeholder:
            return self
        return self._replace(tokens=self.tokens.resolved(sampled[self.sequence_id][0]))


def scheduled_row(
    request: Request, num_new: int, num_draft_tokens: int, checkpoint: int
) -> ScheduledRow:
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
        checkpoint=checkpoint,
        pooling=request.pooling,
        images=request.images,
        rope_positions=request.rope_positions,
        bidirectional_images=request.bidirectional_images,
    )


Copies = tuple[tuple[int, int], ...]
"""Block copies, (source, destination)."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Block copies before a step's forward pass, in this order.

    Attributes:
        within: on the device, for sequences that forked (copy-on-write).
        to_host: swapped out, of preempted sequences.
        from_host: swapped in, of sequences admitted again.
        states: of state slots, for sequences that forked or restore a checkpoint.
    """

    within: Copies = ()
    to_host: Copies = ()
    from_host: Copies = ()
    states: Copies = ()

    def __bool__(self) -> bool:
        return bool(self.within or self.to_host or self.from_host or self.states)


class Compaction(NamedTuple):
    """Compaction of a sequence: in every layer each KV head keeps `num_kept` of its tokens.

    Attributes:
        source, num_slots: the block table before, and its number of tokens.
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

    rows: tuple[ScheduledRow, ...]
    copies: BlockCopies = BlockCopies()
    compactions: tuple[Compaction, ...] = ()

    @property
    def blocks_next_step(self) -> bool:
        """Whether the next step's positions or slots depend on this one: it is not scheduled before."""
        return any(row.compacts or (row.num_samples and not row.samples_one) for row in self.rows)

    @property
    def has_placeholders(self) -> bool:
        """Whether it needs tokens that the previous step samples."""
        return any(row.tokens.has_placeholder for row in self.rows)

    def resolved(self, sampled: Mapping[str, Sequence[int]]) -> StepPlan:
        """The plan with the previous step's tokens, by sequence, in place of the placeholders."""
        return replace(self, rows=tuple(row.resolved(sampled) for row in self.rows))

    @property
    def num_tokens_of(self) -> dict[str, int]:
        """Tokens that each sequence computes in this step."""
        return {row.sequence_id: row.num_tokens for row in self.rows}

    @property
    def checkpoints(self) -> Copies:
        """Copies of states after the forward pass, (slot of a sequence, slot of its checkpoint)."""
        return tuple((row.state_slot, row.checkpoint) for row in self.rows if row.checkpoint)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
