"""Attention over a paged KV cache: causal, grouped-query, with an optional sliding window.

The cache of a layer is `keys`, `values` [blocks, block_size, kv_heads, head_dim]. A batch is a run of
tokens, sequence after sequence; token t of a sequence sees its own past: every position up to its own,
or the last `window` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .dispatch import Candidate, Operation


@dataclass(frozen=True, slots=True)
class AttentionSituation:
    """What a candidate may look at."""

    device: str
    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"heads of {self.head_dim} in {self.dtype} on {self.device}"


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
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """What the decode rows see: 0 or -inf, [sequences, 1, 1, width * block_size]."""
        assert self.decode is not None
        if (-1, window) not in self._masks:
            width = self.decode.block_ids.numel() // self.decode.rows.numel() * self.block_size
            position = torch.arange(width, device=self.decode.rows.device)
            last = self.decode.lengths[:, None]
            self._masks[-1, window] = self._bias(position, last - 1, window)[:, None, None, :]
        return self._masks[-1, window]

    def span_mask(self, index: int, window: int | None) -> torch.Tensor:
        """What the tokens of span `index` see: 0 or -inf, [tokens, num_cached]."""
        if (index, window) not in self._masks:
            span = self.spans[index]
            device = span.block_ids.device
            position = torch.arange(span.num_cached, device=device)
            first = span.num_cached - (span.end - span.begin)
            own = torch.arange(first, span.num_cached, device=device)[:, None]
            self._masks[index, window] = self._bias(position, own, window)
        return self._masks[index, window]

    def _bias(self, position: torch.Tensor, own: torch.Tensor, window: int | None) -> torch.Tensor:
        visible = position <= own
        if window is not None:
            visible &= position > own - window
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=position.device)
        return bias.masked_fill_(~visible, float("-inf"))


AttentionKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch, float, "int | None"], torch.Tensor
]
"""(queries [tokens, heads, head_dim], keys, values, batch, scale, window) → like queries."""


def attend_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The definition, in float32, one token at a time. For tests."""
    out = torch.empty_like(queries)
    num_kv_heads = keys.shape[2]
    spans = list(batch.spans)
    if batch.decode is not None:
        table = batch.decode.block_ids.view(batch.decode.rows.numel(), -1)
        for i, row in enumerate(batch.decode.rows.tolist()):
            spans.append(SequenceSpan(row, row + 1, int(batch.decode.lengths[i]), table[i]))
    for span in spans:
        k = keys[span.block_ids].flatten(0, 1)[: span.num_cached].float()
        v = values[span.block_ids].flatten(0, 1)[: span.num_cached].float()
        first = span.num_cached - (span.end - span.begin)
        for offset, row in enumerate(range(span.begin, span.end)):
            end = first + offset + 1
            begin = 0 if window is None else max(0, end - window)
            q = queries[row].float().view(num_kv_heads, -1, queries.shape[-1])
            scores = torch.einsum("hgd,thd->hgt", q, k[begin:end]) * scale
            mixed = torch.einsum("hgt,thd->hgd", scores.softmax(dim=-1), v[begin:end])
            out[row] = mixed.flatten(0, 1).to(out.dtype)
    return out


def attend_sdpa(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """torch's fused attention over gathered blocks; on any device.

    The query heads of a key-value head are folded into the query length, so that keys are read once
    for all of them: repeating the keys, or `enable_gqa`, is ten times slower on a CPU.
    """
    out = torch.empty_like(queries)
    heads, head_dim = queries.shape[1:]
    num_kv_heads = keys.shape[2]
    group = heads // num_kv_heads
    if (decode := batch.decode) is not None:
        count = decode.rows.numel()
        k = keys.index_select(0, decode.block_ids).view(count, -1, num_kv_heads, head_dim)
        v = values.index_select(0, decode.block_ids).view(count, -1, num_kv_heads, head_dim)
        q = queries.index_select(0, decode.rows).view(count, num_kv_heads, group, head_dim)
        mixed = functional.scaled_dot_product_attention(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=batch.decode_mask(window),
            scale=scale,
        )
        out.index_copy_(0, decode.rows, mixed.reshape(count, heads, head_dim))
    for index, span in enumerate(batch.spans):
        count = span.end - span.begin
        k = keys.index_select(0, span.block_ids).flatten(0, 1)[: span.num_cached].transpose(0, 1)
        v = values.index_select(0, span.block_ids).flatten(0, 1)[: span.num_cached].transpose(0, 1)
        q = queries[span.begin : span.end].view(count, num_kv_heads, group, head_dim)
        folded = q.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * count, head_dim)
        mask = batch.span_mask(index, window).repeat(group, 1)
        mixed = functional.scaled_dot_product_attention(
            folded, k[None], v[None], attn_mask=mask, scale=scale
        )
        unfolded = mixed.view(num_kv_heads, group, count, head_dim).permute(2, 0, 1, 3)
        out[span.begin : span.end] = unfolded.reshape(count, heads, head_dim)
    return out


PAGED_ATTENTION: Operation[AttentionSituation, AttentionKernel] = Operation(
    "paged attention", [Candidate("torch-sdpa", lambda situation: None, attend_sdpa)]
)
