"""Prompts with images as a Python caller writes them, vLLM's `TextPrompt` with `images`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from ...quant.base.errors import BadInput
from .media import ImageSource, MediaLimits, load_images
from .open import ImageSupport
from .processor import PreparedPrompt

_KEYS = ("prompt", "prompt_token_ids", "images")


class ImagePrompt(TypedDict):
    """A prompt with images: its text or its token ids, which hold a placeholder for each image."""

    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[Sequence[int]]
    images: NotRequired[Sequence[ImageSource]]


def prepare_prompt(prompt: Mapping[str, Any], support: ImageSupport) -> PreparedPrompt:
    """Load the images of a prompt and put their placeholder tokens into it.

    Raises:
        BadInput: a key that is not one of `ImagePrompt`, an image that cannot be read, or a model that does
            not take it.
    """
    unknown = sorted(set(prompt) - set(_KEYS))
    if unknown:
        raise BadInput(f"a prompt has no key {unknown[0]!r}: it takes {', '.join(_KEYS)}")
    given = [
        prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None
    ]
    if len(given) != 1:
        raise BadInput("a prompt has either the key 'prompt' or the key 'prompt_token_ids'")
    sources = prompt.get("images") or ()
    if isinstance(sources, str | bytes) or not isinstance(sources, Sequence):
        raise BadInput("the key 'images' of a prompt is a list")
    images = load_images(sources, MediaLimits())
    return support.prepare(given[0], images)
