"""Paged attention (vLLM): causal, grouped-query, with sliding windows, softcap and attention sinks.

The cache of a layer is `keys` [blocks, block_size, kv_heads, head_dim] and `values`, whose head size may
differ; both are dequantized to the queries' dtype. A batch is a flat run of tokens, sequence after sequence.
A token attends to its past: every position up to its own, or the last `window` of them and the
`num_sink_tokens` sink tokens (StreamingLLM), or those of its `chunk` (Llama 4). A block table may omit
evicted blocks. Draft tokens may form a token tree (tree attention): several share a position, and each
attends to the known tokens and to its ancestors in the tree. The tokens of an image may also attend to its
later ones (bidirectional attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import functional

from .paged_tensor import PagedTensor
from .step_plans import StepPlans

KernelMetadata = TypeVar("KernelMetadata")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """A layer's attention mask and score transform.

    Attributes:
        scale: factor on the scores.
        window: sliding window, in tokens, the query's included; None: full causal attention.
        num_sink_tokens: sink tokens: first tokens of a sequence, visible whatever the window (StreamingLLM).
        chunk: chunked attention: a token sees back to the last multiple of `chunk` (Llama 4); None: off.
        softcap: logit softcapping, `cap * tanh(score / cap)` (Gemma 2).
        sinks: [heads], learned sink logits: a score per head in the softmax that weighs no value (gpt-oss).
        bidirectional: tokens of one image attend to each other, within the window (Gemma 3).
    """

    scale: float
    window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bidirectional: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention supports it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """Tree mask of the draft tokens at the end of a sequence, in the order of their slots.

    Attributes:
        depths: int64 [draft], depth in the tree: the position relative to the last known token, from 1 on.
        ancestors: bool [draft, draft], the ancestors of each draft token, itself included.
    """

    depths: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The tokens of one sequence in a batch.

    Attributes:
        begin, end: their rows in the batch.
        num_cached: tokens of the sequence so far, these included.
        block_ids: int64, the block table, without the blocks of the `evicted_span` tokens that follow
            the first `sink_length`.
        tree: of the last tokens so far, where they are a tree of draft tokens; a draft token's slot then
            follows from its index, and its position from its depth.
        images: positions of the images that some of these tokens belong to, all of which they see in layers
            that are bidirectional; what is not in the cache of them is among these tokens.
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
        """Tokens in the blocks: all but the evicted ones."""
        return self.num_cached - self.evicted_span


class DecodeCounts(NamedTuple):
    """What the host knows of a decode group: its rows, and its sequences' tokens in their blocks."""

    rows: Sequence[int]
    num_held: Sequence[int]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The decode sequences of a batch (one query token each), block tables padded to one width.

    Attributes:
        rows: int64 [sequences], the rows of their tokens in the batch.
        block_ids: int64 [sequences * width], padded with the null block.
        lengths: int64 [sequences], tokens so far.
        evicted_spans: int64 [sequences], evicted tokens that follow the first `sink_length`.
        counts: what the host knows of them; None: nothing, as of a captured step.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    lengths: torch.Tensor
    evicted_spans: torch.Tensor
    sink_length: int = 0
    counts: DecodeCounts | None = None


class AttentionBatch:
    """Attention metadata of a step: spans, block tables and masks; built once, shared by all layers.

    Attributes:
        plans: of a captured step, where kernels are planned on the host; None: it is eager.
    """

    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        decode: DecodeGroup | None,
        block_size: int,
        dtype: torch.dtype,
        kernel_metadata: object = None,
        plans: StepPlans | None = None,
    ) -> None:
        self.spans = spans
        self.decode = decode
        self.block_size = block_size
        self.plans = plans
        self._dtype = dtype
        self._masks: dict[tuple[int, int | None, int, int | None, bool], torch.Tensor] = {}
        self._static_metadata = kernel_metadata
        self._kernel_metadata: dict[object, Any] = {}

    @property
    def has_trees(self) -> bool:
        """Whether draft tokens of a sequence form a token tree."""
        return any(span.tree is not None for span in self.spans)

    @property
    def has_images(self) -> bool:
        """Whether some tokens see later ones of their image, in layers with bidirectional attention."""
        return any(span.images for span in self.spans)

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
        """A kernel's metadata of the batch, made once for all layers."""
        known: Any = self._static_metadata
        if known is None and (known := self._kernel_metadata.get(make)) is None:
            known = self._kernel_metadata[make] = make(self)
        return known

    @property
    def is_static(self) -> bool:
        """Whether it is known by its kernel's metadata alone, which a captured step fills."""
        return self._static_metadata is not None

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
        """Slots of the decode tables behind their tokens, bool [sequences, width * block_size, 1, 1]."""
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
            if (tree := span.tree) is not None:
                count = tree.depths.numel()
                rows = min(count, query_position.numel())
                draft_positions = tree.depths + (span.num_cached - count - 1)
                position = torch.cat([position[:-count], draft_positions])
                query_position = torch.cat([query_position[:-rows], draft_positions[-rows:]])
                bias = self._bias(position, query_position[:, None], rule, images)
                bias[-rows:, -count:].masked_fill_(~tree.ancestors[-rows:], float("-inf"))
                self._masks[key] = bias
            else:
                self._masks[key] = self._bias(position, query_position[:, None], rule, images)
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


class AttentionKernel(Protocol):
    """Paged attention: queries [tokens, heads, head_dim] → [tokens, heads, value head_dim].

    `sink_queries` replace the queries against the `num_sink_tokens` sink keys, where those need another
    rotation; only passed with a rule that has sink tokens.
    """

    def __call__(
        self,
        queries: torch.Tensor,
        keys: PagedTensor,
        values: PagedTensor,
        batch: AttentionBatch,
        rule: AttentionRule,
        sink_queries: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def attend_reference(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
    sink_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference implementation, in float32, one token at a time. For tests."""
    out = queries.new_empty(*queries.shape[:2], values.dim)
    sink_queries = queries if sink_queries is None else sink_queries
    spans = list(batch.spans)
    if (group := batch.decode) is not None:
        table = group.block_ids.view(group.rows.numel(), -1)
        for i, row in enumerate(group.rows.tolist()):
            length, evicted_span = int(group.lengths[i]), int(group.evicted_spans[i])
            spans.append(
                SequenceSpan(row, row + 1, length, table[i], group.sink_length, evicted_span)
            )
    for span in spans:
        k = keys.read(span.block_ids, torch.float32).flatten(0, 1)
        v = values.read(span.block_ids, torch.float32).flatten(0, 1)
        positions, ancestors = _positions(span)
        for row in range(span.begin, span.end):
            number = span.num_cached - (span.end - row)
            query_position = positions[number]
            scores, slots = [], []
            for other in range(_num_visible(number, span, rule)):
                position = positions[other]
                is_first = position < rule.num_sink_tokens
                if not is_first and not _is_visible(query_position, position, rule):
                    continue
                if other not in ancestors.get(number, range(len(positions))):
                    continue
                slot = other if other < span.sink_length else other - span.evicted_span
                query = (sink_queries if is_first else queries)[row].float()
                grouped = query.view(keys.num_heads, -1, query.shape[-1])
                scores.append(torch.einsum("hgd,hd->hg", grouped, k[slot]) * rule.scale)
                slots.append(slot)
            logits = torch.stack(scores, dim=-1)
            if rule.softcap is not None:
                logits = rule.softcap * (logits / rule.softcap).tanh()
            if rule.sinks is not None:
                column = rule.sinks.float().view(keys.num_heads, -1, 1)
                logits = torch.cat([logits, column], dim=-1)
            weights = logits.softmax(dim=-1)[..., : len(slots)]
            mixed = torch.einsum("hgt,thd->hgd", weights, v[slots])
            out[row] = mixed.flatten(0, 1).to(out.dtype)
    return out


def _positions(span: SequenceSpan) -> tuple[list[int], dict[int, set[int]]]:
    """Positions of a sequence's tokens so far, and what each draft token of a tree attends to, by index."""
    if span.tree is None:
        return list(range(span.num_cached)), {}
    depths = span.tree.depths.tolist()
    first = span.num_cached - len(depths)
    ancestors = {
        first + index: {*range(first), *(first + other for other, sees in enumerate(row) if sees)}
        for index, row in enumerate(span.tree.ancestors.tolist())
    }
    return [*range(first), *(first - 1 + depth for depth in depths)], ancestors


def _num_visible(number: int, span: SequenceSpan, rule: AttentionRule) -> int:
    """Tokens of a sequence up to the last one that token `number` may attend to."""
    image = next((image for image in span.images if number in image), None)
    return number + 1 if image is None or not rule.bidirectional else image.stop


def _is_visible(query_position: int, position: int, rule: AttentionRule) -> bool:
    """Whether the query at `query_position` attends to an earlier `position`, sink tokens aside."""
    if rule.window is not None and query_position - position >= rule.window:
        return False
    return rule.chunk is None or query_position // rule.chunk == position // rule.chunk


def attend_sdpa(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
    sink_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention of torch over gathered blocks; on any device.

    The query heads of a KV head are folded into the query length, so that keys are read once for all
    of them: repeating the keys, or `enable_gqa`, is ten times slower on a CPU.
    """
    heads, head_dim = queries.shape[1:]
    num_kv_heads, value_dim, dtype = values.num_heads, values.dim, queries.dtype
    group = heads // num_kv_heads
    out = queries.new_empty(queries.shape[0], heads, value_dim)
    sinks = None if rule.sinks is None else rule.sinks.view(1, num_kv_heads, group, 1)
    if (decode := batch.decode) is not None:
        count = decode.rows.numel()
        k = keys.read(decode.block_ids, dtype).view(count, -1, num_kv_heads, head_dim)
        v = values.read(decode.block_ids, dtype).view(count, -1, num_kv_heads, value_dim)
        if k.device.type == "cpu":  # what is not written may be NaN there, and is with weight 0
            for held in (k, v):
                held.masked_fill_(batch.decode_unwritten, 0)
        q = queries.index_select(0, decode.rows).view(count, num_kv_heads, group, head_dim)
        first = (
            None if sink_queries is None else sink_queries.index_select(0, decode.rows).view_as(q)
        )
        mask = batch.decode_mask(rule)
        mixed = _mix(q, k.transpose(1, 2), v.transpose(1, 2), mask, rule, sinks, first)
        out.index_copy_(0, decode.rows, mixed.reshape(count, heads, value_dim))
    for index, span in enumerate(batch.spans):
        count = span.end - span.begin
        k = keys.read(span.block_ids, dtype).flatten(0, 1)[: span.num_held].transpose(0, 1)
        v = values.read(span.block_ids, dtype).flatten(0, 1)[: span.num_held].transpose(0, 1)
        rows = slice(span.begin, span.end)
        folded = _fold(queries[rows], num_kv_heads)
        first = None if sink_queries is None else _fold(sink_queries[rows], num_kv_heads)
        mask = batch.span_mask(index, rule).repeat(group, 1)
        row_sinks = None if sinks is None else sinks.repeat_interleave(count, dim=2)
        mixed = _mix(folded, k[None], v[None], mask, rule, row_sinks, first)
        unfolded = mixed.view(num_kv_heads, group, count, value_dim).permute(2, 0, 1, 3)
        out[rows] = unfolded.reshape(count, heads, value_dim)
    return out


def _fold(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[tokens, heads, head_dim] to [1, kv_heads, heads / kv_heads * tokens, head_dim]."""
    grouped = queries.unflatten(1, (num_kv_heads, -1))
    return grouped.permute(1, 2, 0, 3).flatten(1, 2)[None]


def _mix(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
    sink_queries: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [batch, kv_heads, rows, head_dim]; `sinks` [1, kv_heads, rows, 1].

    The first `rule.num_sink_tokens` keys are scored against `sink_queries` instead of `queries`.
    """
    if rule.is_plain and sink_queries is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=rule.scale
        )
    scores = queries.float() @ keys.float().transpose(-1, -2) * rule.scale
    if sink_queries is not None:
        first = keys[:, :, : rule.num_sink_tokens].float()
        scores[..., : rule.num_sink_tokens] = (
            sink_queries.float() @ first.transpose(-1, -2) * rule.scale
        )
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    scores = scores + mask
    if sinks is not None:
        column = sinks.float().expand(scores.shape[0], -1, scores.shape[2], -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
