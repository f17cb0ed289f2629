"""Warm-up workload: the lengths of the measured requests with tokens of their own."""

from __future__ import annotations

from .random_workload import random_workload
from .workload import Tokenizer, Workload, numbered


def warmup_workload(
    workload: Workload, count: int, tokenizer: Tokenizer, *, seed: int
) -> Workload | None:
    """`count` requests with the lengths of the first of `workload` but different tokens, so that the
    measurement gets no prefix-cache hits from the warm-up. None when `count` is 0."""
    if count == 0:
        return None
    pairs = []
    for number in range(count):
        like = workload.items[number % len(workload.items)]
        length = len(like.prompt_token_ids)
        twin = random_workload(
            tokenizer,
            num_prompts=1,
            max_model_len=length + like.output_len,
            input_len=length,
            output_len=like.output_len,
            seed=seed + 1 + number,
        )
        pairs.append((twin.items[0].prompt_token_ids, like.output_len))
    return Workload("random", "warm-up prompts", numbered(pairs))
