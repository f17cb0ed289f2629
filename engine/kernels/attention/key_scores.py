"""Key scores: the attention weights that each key receives, summed over queries, for KV eviction.

SnapKV's scores (arXiv:2404.14469) and H2O's accumulated attention (arXiv:2306.14048) are this sum, over the
queries at the end of the prompt and over all. Fused attention does not give the weights, so they are computed
again, in float32, for a slice of the queries at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .paged_attention import AttentionRule
from .paged_tensor import PagedTensor

_QUERIES_PER_SLICE = 128


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSpan:
    """Tokens of one sequence whose attention weights are summed.

    Attributes:
        begin, end: their rows in the batch.
        num_slots: slots of the sequence, theirs included, which are the last.
        block_ids: int64, its block table.
        sums: per layer with a cache, float32 [kv_heads, num_slots or more]; the weights are added to it.
    """

    begin: int
    end: int
    num_slots: int
    block_ids: torch.Tensor
    sums: Sequence[torch.Tensor]


def add_key_scores(
    queries: torch.Tensor, keys: PagedTensor, rule: AttentionRule, span: ScoredSpan, layer: int
) -> None:
    """Add the weights of a span's `queries` [tokens, heads, head_dim] to its sums of `layer`.

    The weights of the query heads of a KV head are added up.
    """
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
