"""Paged attention by libraries: FlashAttention-3 (Shah et al., 2024) and FlashInfer (Ye et al., 2025).

Both read our blocks as they are: keys and values [blocks, block_size, kv_heads, head_dim] of 16 bits;
FlashInfer (its layout NHD) also 8 bits without scales, and latents [blocks, block_size, 1, latent + rotated]
(MLA). Our kernel serves the rest: 8-bit caches with scales, latents in 8 bits, sinks, chunks, token trees,
images, evicted spans after sink tokens; with FlashInfer also captured steps of several tokens, and latents
with windows, soft caps or heads that do not divide 128. A library splits the keys of a sequence by the batch,
so its logits depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...base.device import to_device
from ..common.devices import hub_kernel, package, refuses_device
from .batch import AttentionBatch
from .flashinfer_plans import NAME, Shape, pages_of, workspace_on
from .paged_attention import AttentionCall, AttentionKernel, attention_kernel
from .paged_tensor import PagedTensor

REPOSITORY = "kernels-community/flash-attn3"
MAX_HEAD_DIM = 256  # of FlashAttention-3
HEAD_DIMS = (64, 128, 256)
"""Head dimensions that FlashInfer supports."""
LATENT_DIMS = (576, 512)
"""Elements of DeepSeek's latents, with and without their rotated part."""
LATENT_TILE, MOST_LATENT_TILES = 64, 15_000
"""Query heads of a tile, and most tiles of a plan of latents: 16,384 with the tiles that it splits."""
WIDEST_LATENT_TILE = 128
"""Query heads of two tiles side by side. A plan refuses queries whose heads lie in two of these in part: its
causal bound would lose their last key."""


def refuses_flash_attention(
    device: str, dtype: torch.dtype, key_dim: int, value_dim: int
) -> str | None:
    if (reason := refuses_device(device, (8, 9), dtype)) is not None:
        return reason
    if key_dim != value_dim or key_dim > MAX_HEAD_DIM or key_dim % 8:
        return f"it takes heads of multiples of 8 up to {MAX_HEAD_DIM}, keys as wide as values"
    return hub_kernel(REPOSITORY).reason


def refuses_flashinfer(device: str, dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    if (reason := refuses_device(device, (8, 9, 10, 12), dtype)) is not None:
        return reason
    if (key_dim, value_dim) != LATENT_DIMS and (key_dim != value_dim or key_dim not in HEAD_DIMS):
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"it takes heads of {sizes}, keys as wide as values, and latents of 512 and 64"
    return package(NAME).reason


def attend_flash(otherwise: AttentionKernel) -> AttentionKernel:
    """FlashAttention-3, with `otherwise` for calls that it does not serve."""

    @attention_kernel
    def attend(call: AttentionCall) -> torch.Tensor:
        return _by_flash(call) if _is_plain(call) else otherwise(*call)

    return attend


def attend_flashinfer(otherwise: AttentionKernel) -> AttentionKernel:
    """FlashInfer, with `otherwise` for calls that it does not serve."""

    @attention_kernel
    def attend(call: AttentionCall) -> torch.Tensor:
        decode, plans = call.batch.decode, call.batch.plans
        # The host must know the lengths by which FlashInfer plans a step.
        is_planned = decode is None or decode.counts is not None or plans is not None
        is_served = is_planned and _is_plain(call) and _has_flashinfer_heads(call)
        return _by_flashinfer(call) if is_served else otherwise(*call)

    return attend


def _is_plain(call: AttentionCall) -> bool:
    """True if a layer of a step needs nothing that both libraries lack."""
    batch, rule = call.batch, call.rule
    if call.keys.scales is not None or rule.sinks is not None or rule.chunk is not None:
        return False
    if call.sink_queries is not None or rule.num_sink_tokens:
        return False
    if batch.has_trees or batch.is_static:
        return False
    if batch.decode is not None and batch.decode.sink_length:
        return False
    return not any(span.sink_length or span.images for span in batch.spans)


def _has_flashinfer_heads(call: AttentionCall) -> bool:
    """True for keys as wide as values, or latents of a size that FlashInfer can plan."""
    queries, keys, values, batch, rule, _ = call
    if keys.dim == values.dim:
        return True
    shared = keys.codes.data_ptr() == values.codes.data_ptr() and keys.num_heads == 1
    if not shared or rule.window is not None or rule.softcap is not None:
        return False
    if keys.codes.dtype is not queries.dtype:
        return False
    heads = queries.shape[1]
    if WIDEST_LATENT_TILE % heads:
        return False
    tiles = sum(-(-heads * (span.end - span.begin) // LATENT_TILE) for span in batch.spans)
    if batch.decode is not None:
        tiles += len(batch.decode.rows) * -(-heads // LATENT_TILE)
    return tiles <= MOST_LATENT_TILES


class EagerPlans:
    """Plans of an eager step: one for each shape, shared by its layers."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._is_decode = not batch.spans
        sequences: list[tuple[int, int, int, int]] = []  # first row, queries, tokens, place
        tables, offset = [], 0
        if (decode := batch.decode) is not None:
            assert decode.counts is not None
            tables, width = [decode.block_ids], len(decode.block_ids) // len(decode.rows)
            for row, length in zip(*decode.counts, strict=True):
                sequences.append((row, 1, length, offset))
                offset += width
        for span in batch.spans:
            sequences.append((span.begin, span.end - span.begin, span.num_held, offset))
            tables.append(span.block_ids)
            offset += len(span.block_ids)
        sequences.sort()
        self._rows = [row for begin, count, *_ in sequences for row in range(begin, begin + count)]
        _, counts, lengths, places = zip(*sequences, strict=True)
        self._pages = pages_of(counts, lengths, torch.cat(tables), places, batch.block_size)
        self._device = self._pages.indices.device
        self._chosen: torch.Tensor | None = None

    def run(
        self, shape: Shape, queries: torch.Tensor, keys: PagedTensor, values: PagedTensor
    ) -> torch.Tensor:
        """Attention of a batch's rows [rows, heads, head_dim]."""
        wrapper = workspace_on(self._device).eager(shape, is_decode=self._is_decode)
        if wrapper.owner is not self:
            wrapper.plan(self._pages, self)
        if len(self._rows) == len(queries):
            return wrapper.run(queries, keys, values)
        if self._chosen is None:
            self._chosen = to_device(np.array(self._rows, np.int64), self._device)
        some = wrapper.run(queries.index_select(0, self._chosen), keys, values)
        out = queries.new_empty(*queries.shape[:2], values.dim)
        return out.index_copy_(0, self._chosen, some)


def _by_flashinfer(call: AttentionCall) -> torch.Tensor:
    queries, keys, values, batch, rule, _ = call
    heads = queries.shape[1], keys.num_heads, keys.dim, values.dim
    dtypes = queries.dtype, keys.codes.dtype
    shape = Shape(*heads, batch.block_size, *dtypes, rule.scale, rule.window, rule.softcap)
    if batch.plans is not None:
        assert batch.decode is not None and not batch.spans
        return batch.plans.run(batch.decode.block_ids, shape, queries, keys, values)
    return batch.kernel_metadata(EagerPlans).run(shape, queries, keys, values)


class FlashMetadata:
    """int32 block tables, lengths and offsets of a batch; made once a step."""

    def __init__(self, batch: AttentionBatch) -> None:
        decode = batch.decode
        self.rows: torch.Tensor | None = None
        if decode is not None:
            self.rows = decode.rows
            self.tables = decode.block_ids.view(len(decode.rows), -1).int()
            # Places are relative: what was evicted before a window shifts queries and keys alike.
            self.lengths = (decode.lengths - decode.evicted_spans).int()
        if not (spans := batch.spans):
            return
        device = spans[0].block_ids.device
        counts = [span.end - span.begin for span in spans]
        lengths = [span.num_held for span in spans]
        rows = [row for span in spans for row in range(span.begin, span.end)]
        self.longest = max(counts)
        ends = np.cumsum([0, *counts, *lengths], dtype=np.int64)[: len(counts) + 1]
        self.span_offsets = to_device(ends.astype(np.int32), device)
        self.span_lengths = to_device(np.array(lengths, np.int32), device)
        self.span_rows = to_device(np.array(rows, np.int64), device)
        # Padding of block tables is not read.
        tables = [span.block_ids.int() for span in spans]
        self.span_tables = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)


def _by_flash(call: AttentionCall) -> torch.Tensor:
    queries, keys, values, batch, rule, _ = call
    flash: Callable[..., torch.Tensor] = hub_kernel(REPOSITORY).module.flash_attn_with_kvcache
    metadata = batch.kernel_metadata(FlashMetadata)
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
        tables = {"cache_seqlens": metadata.lengths, "page_table": metadata.tables}
        out = flash(chosen.unsqueeze(1), keys.codes, values.codes, **tables, **shared)
        parts.append((rows, out.squeeze(1)))
    if metadata.rows is None or len(metadata.rows) < len(queries):
        rows = metadata.span_rows
        chosen = queries if len(rows) == len(queries) else queries.index_select(0, rows)
        tables = {"cache_seqlens": metadata.span_lengths, "page_table": metadata.span_tables}
        queries_of = {"cu_seqlens_q": metadata.span_offsets, "max_seqlen_q": metadata.longest}
        out = flash(chosen, keys.codes, values.codes, **tables, **queries_of, **shared)
        parts.append((rows, out))
    whole = call.empty_result()
    for rows, out in parts:
        whole.index_copy_(0, rows, out)
    return whole
