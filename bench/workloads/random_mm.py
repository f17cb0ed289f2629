"""Random prompts with random images, as in vLLM's `random-mm`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .image_bucket import ImageBuckets, items_per_request
from .random_workload import random_workload
from .workload import Tokenizer, Workload

IMAGE_NOTE = "prompt tokens are those of the text: the tokens of images come on top"


def random_mm_workload(
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
    max_model_len: int,
    input_len: int | None = None,
    output_len: int | None = None,
    prefix_len: int = 0,
    range_ratio: float = 0.0,
    base_items_per_request: int = 1,
    num_mm_items_range_ratio: float = 0.0,
    limit_mm_per_prompt: str | None = None,
    bucket_config: str | None = None,
    seed: int = 0,
) -> Workload:
    """The prompts of `random`, with images of random pixels behind each.

    Raises:
        BadInput: as `random_workload`, or options of images out of range.
    """
    buckets = ImageBuckets.parse(bucket_config)
    fewest, most = items_per_request(
        base_items_per_request, num_mm_items_range_ratio, limit_mm_per_prompt
    )
    texts = random_workload(
        tokenizer,
        num_prompts=num_prompts,
        max_model_len=max_model_len,
        input_len=input_len,
        output_len=output_len,
        prefix_len=prefix_len,
        range_ratio=range_ratio,
        seed=seed,
    )
    rng = np.random.default_rng([seed, 1])  # the texts are those of `random` with the same seed
    items = tuple(
        replace(
            item,
            images=tuple(buckets.draw(rng) for _ in range(rng.integers(fewest, most + 1))),
        )
        for item in texts.items
    )
    return Workload("random-mm", "random token ids and images", items, (*texts.notes, IMAGE_NOTE))
