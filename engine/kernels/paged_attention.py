"""Attention over a paged KV cache: causal, grouped-query, with windows, soft caps and learned sinks.

The cache of a layer is `keys` of [blocks, block_size, kv_heads, head_dim] and `values` with a head size of
their own; attention is over what they read back in the queries' dtype. A batch is a run of tokens,
sequence after sequence; token t of a sequence sees its own past: every position up to its own, the last
`window` of them, or those of its own `chunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .dispatch import Candidate, Operation
from .paged_tensor import PagedTensor


@dataclass(frozen=True, slots=True)
class AttentionSituation:
    """What a candidate may look at."""

    device: str
    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"heads of {self.head_dim} in {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How a layer weighs what it sees.

    Attributes:
        scale: factor on the scores.
        window: how many tokens a token sees, itself included; None: all before it.
        chunk: a token sees back to the last multiple of `chunk` (Llama 4); None: no such border.
        softcap: scores go through `cap * tanh(score / cap)` (Gemma 2).
        sinks: [heads], a score of each head that takes part in the softmax and weighs no value (gpt-oss).
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention covers it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The tokens of one sequence in a batch.

    Attributes:
        begin, end: where they lie in the batch.
        num_cached: tokens of the sequence in the cache, these included.
        block_ids: int64 [ceil(num_cached / block_size)].
    """

    begin: int
    end: int
    num_cached: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The sequences of a batch that bring a single token, padded to one width.

    Attributes:
        rows: int64 [sequences], where their tokens lie in the batch.
        block_ids: int64 [sequences * width], padded with the null block.
        lengths: int64 [sequences], tokens in the cache.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    lengths: torch.Tensor


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
        self._masks: dict[tuple[int, int | None, int | None], torch.Tensor] = {}

    def decode_mask(self, rule: AttentionRule) -> torch.Tensor:
        """What the decode rows see: 0 or -inf, [sequences, 1, 1, width * block_size]."""
        assert self.decode is not None
        key = (-1, rule.window, rule.chunk)
        if key not in self._masks:
            width = self.decode.block_ids.numel() // self.decode.rows.numel() * self.block_size
            position = torch.arange(width, device=self.decode.rows.device)
            last = self.decode.lengths[:, None]
            self._masks[key] = self._bias(position, last - 1, rule)[:, None, None, :]
        return self._masks[key]

    def span_mask(self, index: int, rule: AttentionRule) -> torch.Tensor:
        """What the tokens of span `index` see: 0 or -inf, [tokens, num_cached]."""
        key = (index, rule.window, rule.chunk)
        if key not in self._masks:
            span = self.spans[index]
            device = span.block_ids.device
            position = torch.arange(span.num_cached, device=device)
            first = span.num_cached - (span.end - span.begin)
            own = torch.arange(first, span.num_cached, device=device)[:, None]
            self._masks[key] = self._bias(position, own, rule)
        return self._masks[key]

    def _bias(self, position: torch.Tensor, own: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        visible = position <= own
        if rule.window is not None:
            visible &= position > own - rule.window
        if rule.chunk is not None:
            visible &= position >= own - own % rule.chunk
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=position.device)
        return bias.masked_fill_(~visible, float("-inf"))


AttentionKernel = Callable[
    [torch.Tensor, PagedTensor, PagedTensor, AttentionBatch, AttentionRule], torch.Tensor
]
"""(queries [tokens, heads, head_dim], keys, values, batch, rule) → [tokens, heads, value head_dim]."""


def attend_reference(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> torch.Tensor:
    """The definition, in float32, one token at a time. For tests."""
    out = queries.new_empty(*queries.shape[:2], values.dim)
    num_kv_heads = keys.num_heads
    spans = list(batch.spans)
    if batch.decode is not None:
        table = batch.decode.block_ids.view(batch.decode.rows.numel(), -1)
        for i, row in enumerate(batch.decode.rows.tolist()):
            spans.append(SequenceSpan(row, row + 1, int(batch.decode.lengths[i]), table[i]))
    for span in spans:
        k = keys.read(span.block_ids, torch.float32).flatten(0, 1)[: span.num_cached]
        v = values.read(span.block_ids, torch.float32).flatten(0, 1)[: span.num_cached]
        first = span.num_cached - (span.end - span.begin)
        for offset, row in enumerate(range(span.begin, span.end)):
            end = first + offset + 1
            begin = 0 if rule.window is None else max(0, end - rule.window)
            if rule.chunk is not None:
                begin = max(begin, (end - 1) // rule.chunk * rule.chunk)
            q = queries[row].float().view(num_kv_heads, -1, queries.shape[-1])
            scores = torch.einsum("hgd,thd->hgt", q, k[begin:end]) * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * (scores / rule.softcap).tanh()
            if rule.sinks is not None:
                scores = torch.cat([scores, rule.sinks.float().view(num_kv_heads, -1, 1)], dim=-1)
            weights = scores.softmax(dim=-1)[..., : end - begin]
            mixed = torch.einsum("hgt,thd->hgd", weights, v[begin:end])
            out[row] = mixed.flatten(0, 1).to(out.dtype)
    return out


def attend_sdpa(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
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
        mask = batch.decode_mask(rule)
        mixed = _mix(q, k.transpose(1, 2), v.transpose(1, 2), mask, rule, sinks)
        out.index_copy_(0, decode.rows, mixed.reshape(count, heads, value_dim))
    for index, span in enumerate(batch.spans):
        count = span.end - span.begin
        k = keys.read(span.block_ids, dtype).flatten(0, 1)[: span.num_cached].transpose(0, 1)
        v = values.read(span.block_ids, dtype).flatten(0, 1)[: span.num_cached].transpose(0, 1)
        q = queries[span.begin : span.end].view(count, num_kv_heads, group, head_dim)
        folded = q.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * count, head_dim)
        mask = batch.span_mask(index, rule).repeat(group, 1)
        row_sinks = None if sinks is None else sinks.repeat_interleave(count, dim=2)
        mixed = _mix(folded, k[None], v[None], mask, rule, row_sinks)
        unfolded = mixed.view(num_kv_heads, group, count, value_dim).permute(2, 0, 1, 3)
        out[span.begin : span.end] = unfolded.reshape(count, heads, value_dim)
    return out


def _mix(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [batch, kv_heads, rows, head_dim]; `sinks` [1, kv_heads, rows, 1]."""
    if rule.is_plain:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=rule.scale
        )
    scores = queries.float() @ keys.float().transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    scores = scores + mask
    if sinks is not None:
        column = sinks.float().expand(scores.shape[0], -1, scores.shape[2], -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


PAGED_ATTENTION: Operation[AttentionSituation, AttentionKernel] = Operation(
    "paged attention", [Candidate("torch-sdpa", lambda situation: None, attend_sdpa)]
)
