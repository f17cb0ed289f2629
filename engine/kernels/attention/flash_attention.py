"""Paged attention by FlashAttention-3 (Shah et al., 2024), from `kernels-community/flash-attn3` of the hub.

It reads our blocks as they are: [blocks, block_size, kv_heads, head_dim], any block size, int32 block tables
and lengths on the device, so that a step can be captured. What it does not have stays with our kernel: 8-bit
caches with a scale for each token and head, sinks, chunks, evicted spans behind sink tokens. How it splits
the keys of a sequence depends on the batch, so its logits do too, in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...base.device import to_device
from ..common.backends import hub_kernel, refuses_device
from .paged_attention import AttentionBatch, AttentionKernel, AttentionRule, SequenceSpan
from .paged_tensor import PagedTensor

REPOSITORY = "kernels-community/flash-attn3"
MAX_HEAD_DIM = 256


def refuses_flash_attention(
    device: str, dtype: torch.dtype, key_dim: int, value_dim: int
) -> str | None:
    """The reason why it does not support heads of a dtype and size on a device, or None."""
    if (reason := refuses_device(device, (8, 9))) is not None:
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {dtype}"
    if key_dim != value_dim or key_dim > MAX_HEAD_DIM or key_dim % 8:
        return f"it takes heads of multiples of 8 up to {MAX_HEAD_DIM}, keys as wide as values"
    return hub_kernel(REPOSITORY).reason


def serves(keys: PagedTensor, batch: AttentionBatch, rule: AttentionRule) -> bool:
    """Whether it can compute a layer of a step."""
    plain = keys.scales is None and rule.sinks is None and rule.chunk is None
    if not plain or rule.num_sink_tokens or batch.has_trees or batch.is_static:
        return False
    if batch.decode is not None and batch.decode.sink_length:
        return False
    return not any(span.sink_length or span.images for span in batch.spans)


class FlashMetadata:
    """int32 block tables, lengths and offsets of a batch; made once a step."""

    def __init__(self, batch: AttentionBatch) -> None:
        decode, self._spans = batch.decode, batch.spans
        self.rows: torch.Tensor | None = None
        if decode is not None:
            self.rows = decode.rows
            self.tables = decode.block_ids.view(len(decode.rows), -1).int()
            # Places are relative: what was evicted before a window shifts queries and keys alike.
            self.lengths = (decode.lengths - decode.evicted_spans).int()
        if self._spans:
            self._of_spans(self._spans, self._spans[0].block_ids.device)

    def _of_spans(self, spans: Any, device: torch.device) -> None:
        counts = [span.end - span.begin for span in spans]
        held = [span.num_held for span in spans]
        rows = [row for span in spans for row in range(span.begin, span.end)]
        self.longest = max(counts)
        ends = np.cumsum([0, *counts, *held], dtype=np.int64)[: len(counts) + 1]
        self.span_offsets = to_device(ends.astype(np.int32), device)
        self.span_lengths = to_device(np.array(held, np.int32), device)
        self.span_rows = to_device(np.array(rows, np.int64), device)
        self.span_tables = _padded(spans)


def _padded(spans: list[SequenceSpan]) -> torch.Tensor:
    """Block tables, int32 [spans, widest]; padding is not read."""
    tables = [span.block_ids.int() for span in spans]
    return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)


def attend_flash(otherwise: AttentionKernel) -> AttentionKernel:
    """Attention by FlashAttention-3, and by the kernel `otherwise` of what it does not serve."""

    def attend(
        queries: torch.Tensor,
        keys: PagedTensor,
        values: PagedTensor,
        batch: AttentionBatch,
        rule: AttentionRule,
        sink_queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sink_queries is not None or not serves(keys, batch, rule):
            return otherwise(queries, keys, values, batch, rule, sink_queries)
        flash = hub_kernel(REPOSITORY).module.flash_attn_with_kvcache
        return _attend(flash, queries, keys, values, batch.kernel_metadata(FlashMetadata), rule)

    return attend


def _attend(
    flash: Callable[..., torch.Tensor],
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    metadata: FlashMetadata,
    rule: AttentionRule,
) -> torch.Tensor:
    window = (-1, -1) if rule.window is None else (rule.window - 1, 0)
    shared: dict[str, Any] = {
        "softmax_scale": rule.scale,
        "causal": True,
        "window_size": window,
        "softcap": rule.softcap or 0.0,
    }
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if metadata.rows is not None:
        rows = metadata.rows
        chosen = queries if len(rows) == len(queries) else queries.index_select(0, rows)
        out = flash(
            chosen.unsqueeze(1),
            keys.codes,
            values.codes,
            cache_seqlens=metadata.lengths,
            page_table=metadata.tables,
            **shared,
        )
        parts.append((rows, out.squeeze(1)))
    if metadata.rows is None or len(metadata.rows) < len(queries):
        rows = metadata.span_rows
        chosen = queries if len(rows) == len(queries) else queries.index_select(0, rows)
        out = flash(
            chosen,
            keys.codes,
            values.codes,
            cache_seqlens=metadata.span_lengths,
            page_table=metadata.span_tables,
            cu_seqlens_q=metadata.span_offsets,
            max_seqlen_q=metadata.longest,
            **shared,
        )
        parts.append((rows, out))
    whole = queries.new_empty(*queries.shape[:2], values.dim)
    for rows, out in parts:
        whole.index_copy_(0, rows, out)
    return whole
