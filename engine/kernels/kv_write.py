"""Storing the keys and values of a step in the paged cache."""

from __future__ import annotations

import torch


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Put each token's keys and values [tokens, kv_heads, head_dim] in its slot.

    Args:
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim].
        slots: int64 [tokens], `block * block_size + offset`. A padding token points at the null block.
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, keys)
    value_cache.flatten(0, 1).index_copy_(0, slots, values)
