"""Chunks of prompts whose images have bidirectional attention: a chunk cuts no image."""

from __future__ import annotations

from ...quant.base.errors import BadInput
from .request import Request
from .scheduler_config import SchedulerConfig


def check_images(request: Request, config: SchedulerConfig) -> None:
    """Raise `BadInput` where an image can never be computed in one step."""
    longest = max((len(image) for image in request.bidirectional_images), default=0)
    if longest > config.chunk:
        raise BadInput(
            f"an image of {longest} tokens, which attend to each other, exceeds the {config.chunk} tokens of "
            "a step: raise max_num_batched_tokens (and prefill_chunk_size), or send a smaller image"
        )
    if longest and config.eviction is not None:
        raise BadInput(
            "a KV budget evicts tokens of an image before the others have seen it: images of this model "
            "need an engine without kv_budget"
        )


def uncut(request: Request, num_new: int, budget: int) -> int:
    """At most `num_new` tokens, so that the step cuts no image: it ends before one, or with it.

    An image that comes next takes as many of the `budget` as it needs, those reserved for other sequences
    too: so a sequence never waits for those after it. 0: it waits for the next step.
    """
    start = request.num_computed_tokens
    end = start + num_new
    image = next((i for i in request.bidirectional_images if i.start < end < i.stop), None)
    if image is None:
        return min(num_new, budget)
    if start < image.start:
        return image.start - start
    left = image.stop - start
    return left if left <= budget else 0
