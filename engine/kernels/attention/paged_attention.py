"""Paged attention (vLLM): the call that all kernels take, and torch's own kernel.

The cache of a layer is `keys` [blocks, block_size, kv_heads, head_dim] and `values`, whose head size may
differ; both are dequantized to the queries' dtype.

For KV eviction the attention weights of each key are summed over the prompt's last queries (SnapKV,
arXiv:2404.14469), or all (H2O, arXiv:2306.14048): computed again, as fused attention does not give them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .batch import AttentionBatch, AttentionRule
from .paged_tensor import PagedTensor


class AttentionCall(NamedTuple):
    """The arguments of paged attention: queries are [tokens, heads, head_dim]. `sink_queries` meet the
    `num_sink_tokens` sink keys, where those need another rotation; else None."""

    queries: torch.Tensor
    keys: PagedTensor
    values: PagedTensor
    batch: AttentionBatch
    rule: AttentionRule
    sink_queries: torch.Tensor | None = None

    def empty_result(self) -> torch.Tensor:
        return self.queries.new_empty(*self.queries.shape[:2], self.values.dim)


AttentionKernel = Callable[..., torch.Tensor]
"""Paged attention: the fields of `AttentionCall` → [tokens, heads, value head_dim]."""


def attention_kernel(compute: Callable[[AttentionCall], torch.Tensor]) -> AttentionKernel:
    """Make a kernel of a function of `AttentionCall`, so that the arguments are listed once."""

    @wraps(compute)
    def attend(*arguments: Any, **named: Any) -> torch.Tensor:
        return compute(AttentionCall(*arguments, **named))

    return attend


@attention_kernel
def attend_sdpa(call: AttentionCall) -> torch.Tensor:
    """Scaled dot-product attention of torch over gathered blocks; on any device. The query heads of a KV head
    are folded into the query length, so that keys are read once for all of them: repeating the keys, or
    `enable_gqa`, is ten times slower on a CPU."""
    queries, keys, values, batch, rule, sink_queries = call
    heads, head_dim = queries.shape[1:]
    num_kv_heads, value_dim, dtype = values.num_heads, values.dim, queries.dtype
    group = heads // num_kv_heads
    out = call.empty_result()
    sinks = None if rule.sinks is None else rule.sinks.view(1, num_kv_heads, group, 1)
    if (decode := batch.decode) is not None:
        count = decode.rows.numel()
        k = keys.read(decode.block_ids, dtype).view(count, -1, num_kv_heads, head_dim)
        v = values.read(decode.block_ids, dtype).view(count, -1, num_kv_heads, value_dim)
        if k.device.type == "cpu":  # what is not written may be NaN there, and is with weight 0
            for gathered in (k, v):
                gathered.masked_fill_(batch.decode_unwritten, 0)
        q = queries.index_select(0, decode.rows).view(count, num_kv_heads, group, head_dim)
        first = None
        if sink_queries is not None:
            first = sink_queries.index_select(0, decode.rows).view_as(q)
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
    """Attention of [batch, kv_heads, rows, head_dim]; `sinks` [1, kv_heads, rows, 1]; both may be None."""
    if rule.softcap is None and rule.sinks is None and sink_queries is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=rule.scale
        )
    scores = queries.float() @ keys.float().transpose(-1, -2) * rule.scale
    if sink_queries is not None:
        first = keys[:, :, : rule.num_sink_tokens].float()
        met = sink_queries.float() @ first.transpose(-1, -2) * rule.scale
        scores[..., : rule.num_sink_tokens] = met
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    scores = scores + mask
    if sinks is not None:
        column = sinks.float().expand(scores.shape[0], -1, scores.shape[2], -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


_QUERIES_PER_SLICE = 128


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSpan:
    """Tokens `begin` to `end` of a batch, of one sequence, whose attention weights are summed. They are its
    last `num_slots`. `sums`, of each layer with a cache, are float32 [kv_heads, num_slots or more]."""

    begin: int
    end: int
    num_slots: int
    block_ids: torch.Tensor
    sums: Sequence[torch.Tensor]


def add_key_scores(
    queries: torch.Tensor, keys: PagedTensor, rule: AttentionRule, span: ScoredSpan, layer: int
) -> None:
    """Add the weights of `queries` [tokens, heads, head_dim], by KV head, to a span's sums of `layer`."""
    k = keys.read(span.block_ids, torch.float32).flatten(0, 1)[: span.num_slots]
    slots = torch.arange(span.num_slots, device=k.device)
    for begin in range(span.begin, span.end, _QUERIES_PER_SLICE):
        end = min(begin + _QUERIES_PER_SLICE, span.end)
        own = slots[span.num_slots - (span.end - begin) :][: end - begin]
        grouped = queries[begin:end].float().unflatten(1, (keys.num_heads, -1))
        scores = torch.einsum("tkgd,skd->kgts", grouped, k) * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * (scores / rule.softcap).tanh()
        scores = scores.masked_fill(slots > own[:, None], float("-inf"))
        if rule.sinks is not None:
            column = rule.sinks.float().view(keys.num_heads, -1, 1, 1)
            scores = torch.cat([scores, column.expand(-1, -1, end - begin, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : span.num_slots]
        span.sums[layer][:, : span.num_slots] += weights.sum(dim=(1, 2))
