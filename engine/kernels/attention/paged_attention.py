"""Attention over a paged KV cache: causal, grouped-query, with windows, soft caps and learned sinks.

The cache of a layer is `keys` of [blocks, block_size, kv_heads, head_dim] and `values` with a head size of
their own; attention is over what they read back in the queries' dtype. A batch is a run of tokens,
sequence after sequence; token t of a sequence sees its own past: every position up to its own, the last
`window` of them and the `num_sink_tokens` first ones, or those of its own `chunk`. A table may leave out blocks that no
token of the batch sees. Guesses may form a tree: then several stand at one position, and each sees the
known tokens and the guesses that lead to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.nn import functional

from .paged_tensor import PagedTensor

KernelMetadata = TypeVar("KernelMetadata")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How a layer weighs what it sees.

    Attributes:
        scale: factor on the scores.
        window: how many tokens a token sees, itself included; None: all before it.
        kept: tokens at the beginning of a sequence that all of its tokens see, whatever the window.
        chunk: a token sees back to the last multiple of `chunk` (Llama 4); None: no such border.
        softcap: scores go through `cap * tanh(score / cap)` (Gemma 2).
        sinks: [heads], a score of each head that takes part in the softmax and weighs no value (gpt-oss).
    """

    scale: float
    window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention covers it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """The guesses at the end of a sequence, in the order of their slots.

    Attributes:
        depths: int64 [guesses], how far behind the last known token each stands, from 1 on.
        sees: bool [guesses, guesses], the guesses that lead to each, itself included.
    """

    depths: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The tokens of one sequence in a batch.

    Attributes:
        begin, end: where they lie in the batch.
        num_cached: tokens of the sequence so far, these included.
        block_ids: int64, the blocks of these tokens, less those of `evicted_span` tokens behind the first `sink_length`.
        tree: of the last tokens so far, where they are guesses that do not follow one another; a token
            then stands in the slot that its number says, and at the position that its depth says.
    """

    begin: int
    end: int
    num_cached: int
    block_ids: torch.Tensor
    sink_length: int = 0
    evicted_span: int = 0
    tree: TreeMask | None = None

    @property
    def num_held(self) -> int:
        """Tokens in the blocks."""
        return self.num_cached - self.evicted_span


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The sequences of a batch that bring a single token, padded to one width.

    Attributes:
        rows: int64 [sequences], where their tokens lie in the batch.
        block_ids: int64 [sequences * width], padded with the null block.
        lengths: int64 [sequences], tokens so far.
        gaps: int64 [sequences], tokens that each table leaves out behind the first `sink_length`.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    lengths: torch.Tensor
    evicted_spans: torch.Tensor
    sink_length: int = 0


class AttentionBatch:
    """Where each token of a step lies and what it may see; made once a step, used by every layer."""

    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        decode: DecodeGroup | None,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.spans = spans
        self.decode = decode
        self.block_size = block_size
        self._dtype = dtype
        self._masks: dict[tuple[int, int | None, int, int | None], torch.Tensor] = {}
        self._kernel_metadata: Any = None

    @property
    def has_trees(self) -> bool:
        """Whether guesses of some sequence form a tree."""
        return any(span.tree is not None for span in self.spans)

    def kernel_metadata(self, make: Callable[[AttentionBatch], KernelMetadata]) -> KernelMetadata:
        """What a kernel makes of the batch, for all layers once; a model asks one kernel."""
        if self._kernel_metadata is None:
            self._kernel_metadata = make(self)
        return self._kernel_metadata

    def decode_mask(self, rule: AttentionRule) -> torch.Tensor:
        """What the decode rows see: 0 or -inf, [sequences, 1, 1, width * block_size]."""
        assert self.decode is not None
        key = (-1, rule.window, rule.num_sink_tokens, rule.chunk)
        if key not in self._masks:
            width = self.decode.block_ids.numel() // self.decode.rows.numel() * self.block_size
            slot = torch.arange(width, device=self.decode.rows.device)
            position = slot + (slot >= self.decode.sink_length) * self.decode.evicted_spans[:, None]
            last = self.decode.lengths[:, None]
            self._masks[key] = self._bias(position, last - 1, rule)[:, None, None, :]
        return self._masks[key]

    def span_mask(self, index: int, rule: AttentionRule) -> torch.Tensor:
        """What the tokens of span `index` see: 0 or -inf, [tokens, num_held]."""
        key = (index, rule.window, rule.num_sink_tokens, rule.chunk)
        if key not in self._masks:
            span = self.spans[index]
            device = span.block_ids.device
            slot = torch.arange(span.num_held, device=device)
            position = slot + (slot >= span.sink_length) * span.evicted_span
            first = span.num_cached - (span.end - span.begin)
            own = torch.arange(first, span.num_cached, device=device)
            if (tree := span.tree) is not None:
                count = tree.depths.numel()
                rows = min(count, own.numel())
                places = tree.depths + (span.num_cached - count - 1)
                position = torch.cat([position[:-count], places])
                own = torch.cat([own[:-rows], places[-rows:]])
                bias = self._bias(position, own[:, None], rule)
                bias[-rows:, -count:].masked_fill_(~tree.ancestors[-rows:], float("-inf"))
                self._masks[key] = bias
            else:
                self._masks[key] = self._bias(position, own[:, None], rule)
        return self._masks[key]

    def _bias(self, position: torch.Tensor, own: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        visible = position <= own
        if rule.window is not None:
            visible &= (position > own - rule.window) | (position < rule.num_sink_tokens)
        if rule.chunk is not None:
            visible &= position >= own - own % rule.chunk
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=position.device)
        return bias.masked_fill_(~visible, float("-inf"))


class AttentionKernel(Protocol):
    """Queries [tokens, heads, head_dim] over keys and values → [tokens, heads, value head_dim].

    `sink_queries` are the queries as they meet the `num_sink_tokens` first keys, where that differs from how they meet
    the others; it is given only with a rule that keeps some.
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
    """The definition, in float32, one token at a time. For tests."""
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
        places, leads = _places(span)
        for row in range(span.begin, span.end):
            number = span.num_cached - (span.end - row)
            own = places[number]
            scores, slots = [], []
            for other in range(number + 1):
                position = places[other]
                is_first = position < rule.num_sink_tokens
                if not is_first and not _is_visible(own, position, rule):
                    continue
                if other not in leads.get(number, range(number + 1)):
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


def _places(span: SequenceSpan) -> tuple[list[int], dict[int, set[int]]]:
    """The positions of a sequence's tokens so far, and what each guess of a tree sees, by their numbers."""
    if span.tree is None:
        return list(range(span.num_cached)), {}
    depths = span.tree.depths.tolist()
    first = span.num_cached - len(depths)
    leads = {
        first + index: {*range(first), *(first + other for other, led in enumerate(row) if led)}
        for index, row in enumerate(span.tree.ancestors.tolist())
    }
    return [*range(first), *(first - 1 + depth for depth in depths)], leads


def _is_visible(own: int, position: int, rule: AttentionRule) -> bool:
    """Whether the token at `own` sees the one at `position` before it, the kept first ones apart."""
    if rule.window is not None and own - position >= rule.window:
        return False
    return rule.chunk is None or own // rule.chunk == position // rule.chunk


def attend_sdpa(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
    sink_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch's attention over gathered blocks; on any device.

    The query heads of a key-value head are folded into the query length, so that keys are read once
    for all of them: repeating the keys, or `enable_gqa`, is ten times slower on a CPU.
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

    The first `rule.num_sink_tokens` keys meet `sink_queries` in place of `queries`.
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
