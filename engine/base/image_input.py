"""Images of a prompt: the placeholder tokens that each takes, and the tensors that the vision tower reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image of a prompt, after its model's image processor.

    The span of an image is the tokens `offset` to `end` of the prompt. Each of them takes an embedding of the
    vision tower, except those where `is_embedded` is false: separators of rows and tiles, which are text.

    Attributes:
        content_hash: of the pixels and of the processor that read them; equal hashes, equal embeddings.
        offset: position of the span's first token in the prompt.
        num_tokens: of the span.
        tensors: arguments of `get_image_features` by name, on the CPU.
        grid: patches of the image in time, height and width, before patches are merged; None: no such grid.
        is_embedded: by token of the span; (): all are.
    """

    content_hash: bytes
    offset: int
    num_tokens: int
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    grid: tuple[int, int, int] | None = None
    is_embedded: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.is_embedded and len(self.is_embedded) != self.num_tokens:
            raise ValueError(f"{len(self.is_embedded)} flags for {self.num_tokens} tokens")

    @property
    def end(self) -> int:
        """Position behind the span's last token."""
        return self.offset + self.num_tokens

    @property
    def num_embeddings(self) -> int:
        """Tokens of the span that take an embedding."""
        return sum(self.is_embedded) if self.is_embedded else self.num_tokens

    def overlaps(self, start: int, end: int) -> bool:
        """Whether its span has tokens of the range."""
        return self.offset < end and start < self.end

    def embedded_positions(self, start: int, end: int) -> tuple[list[int], int]:
        """Positions from `start` to `end` that take an embedding, and how many of the image precede them."""
        first, last = max(start, self.offset), min(end, self.end)
        if not self.is_embedded:
            return list(range(first, last)), first - self.offset
        flags = self.is_embedded
        positions = [p for p in range(first, last) if flags[p - self.offset]]
        return positions, sum(flags[: first - self.offset])


Images = tuple[ImageInput, ...]
"""The images of a prompt, in the order of their spans."""

NO_IMAGES: Images = ()


def content_key(
    images: Sequence[ImageInput], start: int, end: int, bidirectional: Sequence[range] = ()
) -> bytes:
    """Key of what the tokens from `start` to `end` hold besides their ids: images, and the part of each.

    Tokens of a span of `bidirectional` attention depend on all of its images, those behind `end` too.
    """
    seen = [span for span in bidirectional if span.start < end and start < span.stop]
    first = min([start, *(span.start for span in seen)])
    last = max([end, *(span.stop for span in seen)])
    parts = (
        image.content_hash + (image.offset - start).to_bytes(8, "little", signed=True)
        for image in images
        if image.overlaps(first, last)
    )
    return b"".join(parts)
