"""Images of in-process requests: decoded and processed when the request is sent, and timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from ...engine.base.image_input import NO_IMAGES, Images
from ..metrics.trace import RequestTrace
from ..workloads.workload import WorkloadItem

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.multimodal.encoder_cache import EncoderCache


@dataclass(frozen=True, slots=True)
class Prompt:
    """What `Engine.add_request` takes."""

    token_ids: Sequence[int]
    images: Images = NO_IMAGES


@dataclass(slots=True)
class ImagePreparation:
    """Counts and seconds of the images that were prepared since the last `reset`."""

    num_requests: int = 0
    num_images: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        self.num_requests = self.num_images = self.num_tokens = 0
        self.seconds = 0.0

    def prepared(self, item: WorkloadItem, engine: Engine) -> Prompt:
        """The prompt of a request; one with images has them behind its text.

        Raises:
            BadInput: the model takes no images, or one is broken.
        """
        if not item.images:
            return Prompt(item.prompt_token_ids)
        from ...engine.multimodal.media import MediaLimits, load_images

        began, support = time.perf_counter(), engine.images
        if support.processor is None:
            support.refuse()
        images = load_images(item.images, MediaLimits())
        placeholder = engine.tokenizer.convert_tokens_to_ids(support.processor.image_token)
        text = item.prompt_token_ids
        prepared = support.prepare([*text, *[placeholder] * len(images)], images)
        self.num_requests += 1
        self.num_images += len(images)
        self.num_tokens += len(prepared.token_ids) - len(text)
        self.seconds += time.perf_counter() - began
        return Prompt(prepared.token_ids, prepared.images)


def images_part(
    preparation: ImagePreparation,
    encoders: EncoderCache | None,
    traces: Sequence[RequestTrace],
) -> dict[str, Any] | None:
    """The images of a pass, and the parts of the mean TTFT in milliseconds; None without images.

    `prepare` is decoding and the image processor, `encode` the vision tower (a step's encoding is shared
    among its images), `prefill` the rest, queueing included.
    """
    count = preparation.num_requests
    if encoders is None or not count:
        return None
    stats = encoders.stats
    ttfts = [trace.ttft for trace in traces if trace.success]
    prepare, encode = (
        1e3 * seconds / count for seconds in (preparation.seconds, stats.encode_seconds)
    )
    return {
        "num_requests": count,
        "num_images": preparation.num_images,
        "image_tokens": preparation.num_tokens,
        "encoder_cache_hits": stats.num_hits,
        "encode_seconds": stats.encode_seconds,
        "mean_ttft_parts_ms": {
            "prepare": prepare,
            "encode": encode,
            "prefill": 1e3 * mean(ttfts) - prepare - encode if ttfts else None,
        },
    }
