"""Content of a message: text alone, or parts of text and images in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_PARTS = 4096
"""Limit, because parts are validated on the event loop."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message: a text, or the URL of an image."""

    text: str | None = None
    image_url: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates of image-text models receive it: of an image only that it is there."""
        return {"type": "image"} if self.text is None else {"type": "text", "text": self.text}


def read_parts(content: Any) -> tuple[Part, ...] | None:
    """The parts of a list of content; None for a content of another type.

    Raises:
        ValueError: a part of another type, or too many of them.
    """
    if not isinstance(content, list):
        return None
    if len(content) > MAX_PARTS:
        raise ValueError(f"{len(content)} content parts: at most {MAX_PARTS}")
    return tuple(map(_part, content))


def joined_text(parts: Sequence[Part]) -> str:
    """The texts of the parts."""
    return "".join(part.text or "" for part in parts)


def image_part(url: Any) -> dict[str, Any]:
    """An image as a content part of OpenAI's chat completions."""
    return {"type": "image_url", "image_url": {"url": url}}


def _part(part: Any) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return Part(text=part["text"])
    if kind == "image_url":
        # `detail` has no effect: the model's processor says how many tokens an image takes.
        named = part.get("image_url")
        url = named.get("url") if isinstance(named, dict) else named
        if isinstance(url, str) and url:
            return Part(image_url=url)
        raise ValueError('a part of type "image_url" needs {"image_url": {"url": "..."}}')
    raise ValueError(f"content parts of type {kind!r} are not supported: text and image_url only")
