"""Images that clients send to `llmopt serve-local` and `llmopt batch`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from ..groups import Hidden

if TYPE_CHECKING:
    from ....engine.multimodal.media import MediaLimits


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Hosts and limits of images."""

    PANEL: ClassVar = "Images"

    allowed_media_domains: Annotated[
        list[str] | None,
        typer.Option(
            help="Host whose http(s) image URLs are fetched; repeatable. Default: none, data URLs only."
        ),
    ] = None
    limit_mm_per_prompt: Annotated[
        str | None,
        typer.Option(
            help="Images per prompt, as JSON: '{\"image\": 4}'. Default: 16.",
        ),
        Hidden("--limit-mm-per-prompt.image"),
    ] = None
    max_image_pixels: Annotated[
        int, typer.Option(help="Maximum pixels of an image, by its header.")
    ] = 1 << 25
    max_image_bytes: Annotated[str, typer.Option(help="Maximum encoded size of an image.")] = (
        "16MiB"
    )
    media_timeout: Annotated[
        float, typer.Option(help="Timeout for fetching an image, in seconds.")
    ] = 5.0

    def limits(self) -> MediaLimits:
        """The limits of images.

        Raises:
            BadInput: an invalid limit or host name.
        """
        from ....engine.base.units import parse_bytes
        from ....engine.multimodal.media import MediaLimits

        limits = MediaLimits(
            allowed_domains=frozenset(name.lower() for name in self.allowed_media_domains or ()),
            max_image_bytes=parse_bytes(self.max_image_bytes),
            max_image_pixels=self.max_image_pixels,
            fetch_timeout_seconds=self.media_timeout,
        )
        return limits.with_max_images(self._max_images())

    def _max_images(self) -> int | None:
        """The count of images in vLLM's `{"image": 4}` or `{"image": {"count": 4}}`, or the number alone as
        its `--limit-mm-per-prompt.image 4` gives it."""
        from ....quant.base.errors import BadInput

        if self.limit_mm_per_prompt is None:
            return None
        usage = BadInput(
            f"--limit-mm-per-prompt {self.limit_mm_per_prompt}: give JSON such as "
            "'{\"image\": 4}'; models here take images alone"
        )
        try:
            asked = json.loads(self.limit_mm_per_prompt)
        except ValueError as error:
            raise usage from error
        if type(asked) is int:
            return asked
        if not isinstance(asked, dict):
            raise usage
        counts = {k: v.get("count") if isinstance(v, dict) else v for k, v in asked.items()}
        if any(type(count) is not int for count in counts.values()):
            raise usage
        if any(count for kind, count in counts.items() if kind != "image"):
            raise usage
        return counts.get("image")
