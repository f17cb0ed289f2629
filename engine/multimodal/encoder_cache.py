"""Encoder cache: an LRU of images' embeddings by content hash, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.image_input import ImageInput
from .encoder import EncodedImage, VisionEncoder


@dataclass(slots=True)
class EncoderStats:
    """Counters of an encoder cache since its start."""

    num_queries: int = 0
    num_hits: int = 0
    num_evicted: int = 0
    encode_seconds: float = 0.0


class EncoderCache:
    """Embeddings of images, computed on a miss.

    An image whose prompt is computed in several steps is looked up in each of them, and after a preemption
    again: what was dropped meanwhile is encoded anew. What alone exceeds the budget is not kept.

    Args:
        encoder: the vision tower.
        max_bytes: budget of the embeddings that are kept.
    """

    def __init__(self, encoder: VisionEncoder, max_bytes: int) -> None:
        self.encoder, self.max_bytes = encoder, max_bytes
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self.num_bytes = 0
        self.stats = EncoderStats()

    def __len__(self) -> int:
        return len(self._kept)

    @torch.inference_mode()
    def embeddings(self, images: Sequence[ImageInput]) -> dict[bytes, EncodedImage]:
        """The embeddings of a step's images, by content hash; each distinct one is encoded at most once."""
        wanted = {image.content_hash: image for image in images}
        held = {name: self._kept[name] for name in wanted if name in self._kept}
        self.stats.num_queries += len(wanted)
        self.stats.num_hits += len(held)
        for name in held:
            self._kept.move_to_end(name)
        missing = [image for name, image in wanted.items() if name not in held]
        if missing:
            encoded, seconds = self.encoder.timed_encode(missing)
            self.stats.encode_seconds += seconds
            for image, embeddings in zip(missing, encoded, strict=True):
                held[image.content_hash] = embeddings
                self._keep(image.content_hash, embeddings)
        return held

    def reset(self) -> None:
        """Drop what is kept, and the counters."""
        self._kept.clear()
        self.num_bytes, self.stats = 0, EncoderStats()

    def _keep(self, name: bytes, encoded: EncodedImage) -> None:
        if encoded.num_bytes > self.max_bytes:
            return
        self._kept[name] = encoded
        self.num_bytes += encoded.num_bytes
        while self.num_bytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.stats.num_evicted += 1
