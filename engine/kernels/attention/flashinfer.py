"""Paged attention by FlashInfer (Ye et al., 2025), from the package `flashinfer-python`.

It reads our blocks as they are: keys and values [blocks, block_size, kv_heads, head_dim] of 16 bits (its
layout NHD), of any block size; and latents [blocks, block_size, 1, latent + rotated] (MLA). Its 8-bit caches
have a scale for a tensor, ours for each token and head. What it does not have stays with our kernel: 8-bit
caches, sinks, chunks, token trees, evicted spans behind sink tokens, captured steps of several tokens, and
latents with windows, soft caps or heads that do not divide 128. How it splits the keys of a sequence depends
on the batch, so its logits do too, in the last bits.
"""

from __future__ import annotations

from functools import partial

import torch

from ..common.backends import package, refuses_device
from .flashinfer_plans import NAME, CapturedPlans, EagerPlans, Shape
from .paged_attention import AttentionBatch, AttentionKernel, AttentionRule
from .paged_tensor import PagedTensor

HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = (576, 512)
"""Elements of DeepSeek's latents with their rotated part, and without."""
LATENT_TILE, MOST_LATENT_TILES = 64, 15_000
"""Query heads of a tile, and what a plan of latents takes of them: 16,384 with those that it splits."""
WIDEST_LATENT_TILE = 128
"""Query heads of two tiles side by side. A plan refuses queries whose heads lie in two of these in part: its
causal bound would lose their last key."""


def refuses_flashinfer(device: str, dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """The reason why it does not support heads of a dtype and size on a device, or None."""
    if (reason := refuses_device(device, (8, 9, 10, 12))) is not None:
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {dtype}"
    if (key_dim, value_dim) != LATENT_DIMS and (key_dim != value_dim or key_dim not in HEAD_DIMS):
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"it takes heads of {sizes}, keys as wide as values, and latents of 512 and 64"
    return package(NAME).reason


def serves(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> bool:
    """Whether it can compute a layer of a step."""
    if keys.scales is not None or rule.sinks is not None or rule.chunk is not None:
        return False
    if rule.num_sink_tokens or batch.has_trees or batch.is_static:
        return False
    if any(span.sink_length or span.images for span in batch.spans):
        return False
    decode = batch.decode
    if decode is not None and (
        decode.sink_length or (decode.counts is None and batch.plans is None)
    ):
        return False
    return keys.dim == values.dim or _serves_latents(queries, keys, values, batch, rule)


def _serves_latents(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> bool:
    shared = keys.codes.data_ptr() == values.codes.data_ptr() and keys.num_heads == 1
    if not shared or rule.window is not None or rule.softcap is not None:
        return False
    heads = queries.shape[1]
    if WIDEST_LATENT_TILE % heads:
        return False
    tiles = sum(-(-heads * (span.end - span.begin) // LATENT_TILE) for span in batch.spans)
    if batch.decode is not None:
        tiles += len(batch.decode.rows) * -(-heads // LATENT_TILE)
    return tiles <= MOST_LATENT_TILES


def attend_flashinfer(otherwise: AttentionKernel) -> AttentionKernel:
    """Attention by FlashInfer, and by the kernel `otherwise` of what it does not serve."""

    def attend(
        queries: torch.Tensor,
        keys: PagedTensor,
        values: PagedTensor,
        batch: AttentionBatch,
        rule: AttentionRule,
        sink_queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sink_queries is not None or not serves(queries, keys, values, batch, rule):
            return otherwise(queries, keys, values, batch, rule, sink_queries)
        shape = Shape(
            queries.shape[1],
            keys.num_heads,
            keys.dim,
            values.dim,
            batch.block_size,
            queries.dtype,
            rule.scale,
            rule.window,
            rule.softcap,
        )
        if (plans := batch.plans) is None:
            planned = batch.kernel_metadata(EagerPlans)
        else:
            make = partial(CapturedPlans, batch, plans.num_held)
            planned = plans.of(CapturedPlans, make)
        return planned.run(shape, queries, keys, values)

    return attend
