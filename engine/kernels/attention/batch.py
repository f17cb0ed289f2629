"""Attention metadata of a step: its sequences, block tables and masks, and a layer's rule.

A batch is a flat run of tokens, sequence after sequence. Draft tokens may form a token tree: several share a
position, and each attends to known tokens and its ancestors. FlashInfer plans a captured step on the host:
its first run makes plans, in buffers of the graph, and `renew` precedes each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from .flashinfer_plans import CapturedPlans


KernelMetadata = TypeVar("KernelMetadata")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """Attention mask and score transform of a layer.

    Attributes:
        window: sliding window, in tokens, the query's included; None: full causal attention.
        num_sink_tokens: first tokens of a sequence that stay visible outside the window (StreamingLLM).
        chunk: chunked attention: a token sees back to the last multiple of `chunk` (Llama 4); None: off.
        softcap: logit softcapping, `cap * tanh(score / cap)` (Gemma 2).
        sinks: [heads], learned sink logits: a score per head in the softmax without a value (gpt-oss).
        bidirectional: tokens of one image attend to each other, within the window (Gemma 3).
    """

    scale: float
    window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bidirectional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """Tree mask of the draft tokens at the end of a sequence, in the order of their slots; depths start at 1.
    `ancestors` [draft, draft] includes each token itself; `depths` are relative to the last known token."""

    depths: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Tokens of one sequence in a batch.

    Attributes:
        num_cached: tokens of the sequence so far, these included.
        block_ids: int64, block table without the blocks of the `evicted_span` tokens after the first
            `sink_length`.
        tree: tree mask of the last tokens, if they are a tree of draft tokens; a draft token's slot follows
            from its index, its position from its depth.
        images: positions of the images that some of these tokens belong to. In bidirectional layers they see
            all of them; the uncached part of an image is among these tokens.
    """

    begin: int
    end: int
    num_cached: int
    block_ids: torch.Tensor
    sink_length: int = 0
    evicted_span: int = 0
    tree: TreeMask | None = None
    images: tuple[range, ...] = ()

    @property
    def num_held(self) -> int:
        return self.num_cached - self.evicted_span


class DecodeCounts(NamedTuple):
    """Host copy of a decode group: its rows, and its sequences' tokens in their blocks."""

    rows: Sequence[int]
    num_held: Sequence[int]


class DecodeConstants(NamedTuple):
    """Metadata of Triton's attention that decode steps of static inputs share: segments int64 [sequences, 6],
    but for lengths and evicted spans, which each step writes, and tiles int64 [sequences, 3]."""

    segments: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, width: int) -> DecodeConstants:
        zeros, ones = torch.zeros_like(rows), torch.ones_like(rows)
        segments = rows, ones, ones, zeros, zeros, rows * width
        return cls(torch.stack(segments, dim=1), torch.stack((rows, zeros, rows), dim=1))


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode sequences of a batch, one query token each; int64 [sequences] but for `block_ids`.

    `rows` are their rows in the batch. `block_ids` [sequences * width] are padded with the null block.
    `lengths` are tokens so far, `evicted_spans` those evicted after the first `sink_length`. `counts`: a host
    copy; None in a captured step. `constants`: of static inputs without a `sink_length`.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    lengths: torch.Tensor
    evicted_spans: torch.Tensor
    sink_length: int = 0
    counts: DecodeCounts | None = None
    constants: DecodeConstants | None = None


class AttentionBatch:
    """Attention metadata of a step, built once for all layers; `plans`: of a captured step, or None."""

    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        decode: DecodeGroup | None,
        block_size: int,
        dtype: torch.dtype,
        kernel_metadata: object = None,
        plans: CapturedPlans | None = None,
    ) -> None:
        self.spans = spans
        self.decode = decode
        self.block_size = block_size
        self.plans = plans
        self._dtype = dtype
        self._masks: dict[tuple[int, int | None, int, int | None, bool], torch.Tensor] = {}
        self._static_metadata = kernel_metadata
        # Draft tokens form a token tree; tokens see later ones of their image in bidirectional layers.
        self.has_trees = any(span.tree is not None for span in spans)
        self.has_images = any(span.images for span in spans)
        # A captured step fills its kernel's metadata, and nothing else.
        self.is_static = kernel_metadata is not None
        self._kernel_metadata: dict[object, Any] = {}

    @cached_property
    def parts(self) -> tuple[AttentionBatch, AttentionBatch]:
        """The spans with images, and the rest of the batch."""
        images = [span for span in self.spans if span.images]
        others = [span for span in self.spans if not span.images]
        return (
            AttentionBatch(images, None, self.block_size, self._dtype),
            AttentionBatch(others, self.decode, self.block_size, self._dtype),
        )

    def kernel_metadata(self, make: Callable[[AttentionBatch], KernelMetadata]) -> KernelMetadata:
        known: Any = self._static_metadata
        if known is None and (known := self._kernel_metadata.get(make)) is None:
            known = self._kernel_metadata[make] = make(self)
        return known

    def decode_mask(self, rule: AttentionRule) -> torch.Tensor:
        """Additive mask of the decode rows: 0 or -inf, [sequences, 1, 1, width * block_size]."""
        assert self.decode is not None
        key = (-1, rule.window, rule.num_sink_tokens, rule.chunk, False)
        if key not in self._masks:
            width = self.decode.block_ids.numel() // self.decode.rows.numel() * self.block_size
            slot = torch.arange(width, device=self.decode.rows.device)
            position = slot + (slot >= self.decode.sink_length) * self.decode.evicted_spans[:, None]
            last = self.decode.lengths[:, None]
            self._masks[key] = self._bias(position, last - 1, rule)[:, None, None, :]
        return self._masks[key]

    @cached_property
    def decode_unwritten(self) -> torch.Tensor:
        """Slots of the decode tables after their tokens, bool [sequences, width * block_size, 1, 1]."""
        group = self.decode
        assert group is not None
        width = group.block_ids.numel() // group.rows.numel() * self.block_size
        num_held = (group.lengths - group.evicted_spans)[:, None]
        return (torch.arange(width, device=num_held.device) >= num_held)[..., None, None]

    def span_mask(self, index: int, rule: AttentionRule) -> torch.Tensor:
        """Additive mask of the tokens of span `index`: 0 or -inf, [tokens, num_held]."""
        key = (index, rule.window, rule.num_sink_tokens, rule.chunk, rule.bidirectional)
        if key not in self._masks:
            span = self.spans[index]
            device = span.block_ids.device
            slot = torch.arange(span.num_held, device=device)
            position = slot + (slot >= span.sink_length) * span.evicted_span
            first = span.num_cached - (span.end - span.begin)
            query_position = torch.arange(first, span.num_cached, device=device)
            images = span.images if rule.bidirectional else ()
            count = rows = 0
            if (tree := span.tree) is not None:
                count = tree.depths.numel()
                rows = min(count, query_position.numel())
                draft_positions = tree.depths + (span.num_cached - count - 1)
                position = torch.cat([position[:-count], draft_positions])
                query_position = torch.cat([query_position[:-rows], draft_positions[-rows:]])
            bias = self._masks[key] = self._bias(position, query_position[:, None], rule, images)
            if tree is not None:
                bias[-rows:, -count:].masked_fill_(~tree.ancestors[-rows:], float("-inf"))
        return self._masks[key]

    def _bias(
        self,
        position: torch.Tensor,
        query_position: torch.Tensor,
        rule: AttentionRule,
        images: Sequence[range] = (),
    ) -> torch.Tensor:
        visible = position <= query_position
        for image in images:
            visible |= _is_within(position, image) & _is_within(query_position, image)
        if rule.window is not None:
            in_window = position > query_position - rule.window
            visible &= in_window | (position < rule.num_sink_tokens)
        if rule.chunk is not None:
            visible &= position >= query_position - query_position % rule.chunk
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=position.device)
        return bias.masked_fill_(~visible, float("-inf"))


def _is_within(position: torch.Tensor, image: range) -> torch.Tensor:
    return (position >= image.start) & (position < image.stop)
