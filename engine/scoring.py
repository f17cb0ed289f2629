"""Scores of given tokens, outside the schedule: for perplexity and for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..quant.errors import BadInput
from .block_pool import BlockPool
from .model_runner import ModelRunner
from .scheduler_config import SchedulerConfig
from .window import take_out


def prompt_logits(
    runner: ModelRunner,
    pool: BlockPool,
    config: SchedulerConfig,
    token_ids: Sequence[int],
    lora: str | None = None,
) -> torch.Tensor:
    """Scores after each of `token_ids`, float32 [tokens, vocab], in chunks, over blocks of the pool.

    Raises:
        BadInput: more tokens than fit in the context or in the free blocks.
    """
    count = len(token_ids)
    if count > config.max_model_len or config.most_blocks(count) > pool.num_free:
        raise BadInput(
            f"{count} tokens to score exceed the context of {config.max_model_len} tokens "
            f"or the {pool.num_free * config.block_size} free tokens of the KV cache"
        )
    table: list[int] = []
    dropped = range(0)
    scores: list[torch.Tensor] = []
    try:
        for begin in range(0, count, config.chunk):
            tokens = token_ids[begin : begin + config.chunk]
            end = begin + len(tokens)
            table += pool.allocate(config.num_blocks(end) - len(table))
            scores.append(runner.score(begin, tokens, table, lora))
            pool.free(take_out(table, dropped, places := config.dropped(end)))
            dropped = places
    finally:
        pool.free([*table[: dropped.start], *table[dropped.stop :]])
    return torch.cat(scores)
