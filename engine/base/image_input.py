"""Images of a prompt: limits of what is sent, placeholder tokens, and tensors for the vision tower."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...base.errors import BadInput
from ...base.option import check_limits, no_less_than, option
from .units import parse_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image of a prompt, after its model's image processor.

    The span of an image is the tokens `offset` to `end` of the prompt. Each of them takes an embedding of the
    vision tower, except those where `is_embedded` is false: separators of rows and tiles, which are text.

    Attributes:
        content_hash: hash of the pixels and the processor; equal hashes mean equal embeddings.
        tensors: arguments of `get_image_features` by name, on the CPU.
        grid: patches of the image in time, height and width, before patches are merged; None: no such grid.
        is_embedded: flag of each token of the span; (): all take an embedding.
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
        return self.offset + self.num_tokens

    @property
    def num_embeddings(self) -> int:
        return sum(self.is_embedded) if self.is_embedded else self.num_tokens

    def overlaps(self, start: int, end: int) -> bool:
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
    """Key of images in the tokens from `start` to `end`; a `bidirectional` span depends on all of them."""
    seen = [span for span in bidirectional if span.start < end and start < span.stop]
    first = min([start, *(span.start for span in seen)])
    last = max([end, *(span.stop for span in seen)])
    parts = (
        image.content_hash + (image.offset - start).to_bytes(8, "little", signed=True)
        for image in images
        if image.overlaps(first, last)
    )
    return b"".join(parts)


PROMPT_PIXELS = 4
"""All images of a prompt may together have this many times the pixels of the largest."""
MAX_IMAGES = 16


def parse_max_images(text: str) -> int:
    """Images in `{"image": 4}`, `{"image": {"count": 4}}` or `4` (vLLM); BadInput: another form or kind."""
    try:
        limits: Any = json.loads(text)
    except ValueError:
        limits = None
    if type(limits) is int:
        return limits
    counts: dict[str, Any] = {}
    if isinstance(limits, dict):
        counts = {k: v.get("count") if isinstance(v, dict) else v for k, v in limits.items()}
    is_known = all(type(n) is int and (kind == "image" or not n) for kind, n in counts.items())
    if not isinstance(limits, dict) or not is_known:
        raise BadInput(
            f"--limit-mm-per-prompt {text}: give JSON such as "
            "'{\"image\": 4}'; models here take images alone"
        )
    return counts.get("image", MAX_IMAGES)


def size_option(default: str, help: str, flag: str = "") -> Any:
    """Define a field of bytes, which a command line gives with their unit."""
    return option(
        parse_bytes(default),
        help,
        flag=flag,
        word=str,
        text=default,
        parse=parse_bytes,
        limit=no_less_than(1),
    )


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of a prompt's images, and hosts of http(s) URLs. BadInput: out of range, or no host's name."""

    PANEL: ClassVar = "Images"

    allowed_domains: frozenset[str] = option(
        frozenset(),
        "Host whose http(s) image URLs are fetched; repeatable. Default: none, data URLs only.",
        flag="--allowed-media-domains",
        word=list[str],
        parse=lambda names: frozenset(name.lower() for name in names),
    )
    max_images: int = option(
        MAX_IMAGES,
        "Images per prompt, as JSON: '{\"image\": 4}'. Default: 16.",
        flag="--limit-mm-per-prompt",
        hidden_flags=("--limit-mm-per-prompt.image",),
        word=str,
        parse=parse_max_images,
        limit=no_less_than(0),
    )
    max_image_pixels: int = option(
        1 << 25, "Maximum pixels of an image, by its header.", limit=no_less_than(1)
    )
    max_image_bytes: int = size_option("16MiB", "Maximum encoded size of an image.")
    fetch_timeout_seconds: float = option(
        5.0,
        "Timeout for fetching an image, in seconds.",
        flag="--media-timeout",
        limit=lambda seconds: None if seconds > 0 else "more than 0",
    )

    def __post_init__(self) -> None:
        check_limits(self, by_flag=True)
        for domain in self.allowed_domains:
            if not domain or domain != domain.strip() or "/" in domain:
                raise BadInput(
                    f"--allowed-media-domains {domain!r}: a host name without scheme and path"
                )

    def check_count(self, count: int) -> None:
        if count > self.max_images:
            raise BadInput(
                f"{count} images in a prompt: at most {self.max_images} (--limit-mm-per-prompt)"
            )

    def check_prompt_pixels(self, num_pixels: int) -> None:
        most = PROMPT_PIXELS * self.max_image_pixels
        if num_pixels > most:
            raise BadInput(
                f"the images of a prompt have {num_pixels} pixels: at most {most} "
                f"({PROMPT_PIXELS} x --max-image-pixels)"
            )

    def check_pixels(self, width: int, height: int) -> None:
        if width * height > self.max_image_pixels:
            raise BadInput(
                f"an image of {width} x {height} pixels: at most {self.max_image_pixels} "
                "(--max-image-pixels)"
            )
