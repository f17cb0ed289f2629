"""Chunked forward passes outside the scheduler: for perplexity, embeddings and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...quant.base.errors import BadInput
from ..scheduling.block_pool import BlockPool
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.window import evict_blocks


def forward_in_chunks(
    compute: Callable[[int, Sequence[int], Sequence[int], str | None], torch.Tensor],
    pool: BlockPool,
    config: SchedulerConfig,
    token_ids: Sequence[int],
    lora: str | None = None,
) -> torch.Tensor:
    """Results of `compute` for all tokens, [tokens, ...], in chunks, over blocks allocated from the pool.

    Args:
        compute: (position of the first token, tokens, block ids, adapter) -> a row per token.

    Raises:
        BadInput: more tokens than fit in the context or in the free blocks.
    """
    count = len(token_ids)
    if count > config.max_model_len or config.max_blocks(count) > pool.num_free:
        raise BadInput(
            f"{count} tokens to score exceed the context of {config.max_model_len} tokens "
            f"or the {pool.num_free * config.block_size} free tokens of the KV cache"
        )
    table: list[int] = []
    evicted = range(0)
    results: list[torch.Tensor] = []
    try:
        for begin in range(0, count, config.chunk):
            tokens = token_ids[begin : begin + config.chunk]
            end = begin + len(tokens)
            table += pool.allocate(config.num_blocks(end) - len(table))
            results.append(compute(begin, tokens, table, lora))
            pool.free(evict_blocks(table, evicted, now := config.evicted(end)))
            evicted = now
    finally:
        pool.free([*table[: evicted.start], *table[evicted.stop :]])
    return torch.cat(results)
