"""Open a checkpoint's processor, vision encoder and cache, and prepare prompts with images for them.

A prompt is vLLM's `TextPrompt` with `images`, as a Python caller writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, NoReturn, NotRequired, TypedDict

import torch

from ...quant.base.errors import BadInput
from ...quant.load_processor import has_processor
from ...quant.model.checkpoint import Checkpoint
from .encoder import EncoderCache
from .media import ImageSource, MediaLimits, load_images
from .processor import ImageProcessor, PreparedPrompt

if TYPE_CHECKING:
    from PIL.Image import Image


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


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """An engine's processor and encoder of images.

    Attributes:
        processor, encoders: None without.
        reason: why there is none.
    """

    processor: ImageProcessor | None = None
    encoders: EncoderCache | None = None
    reason: str = ""

    @property
    def bytes_held(self) -> int:
        """Bytes of the tower's weights."""
        return 0 if self.encoders is None else self.encoders.encoder.bytes_held

    @property
    def cache_bytes(self) -> int:
        """Bytes of the embeddings that may be kept."""
        return 0 if self.encoders is None else self.encoders.max_bytes

    def profile_run(self, max_tokens: int) -> None:
        """Encode, for its peak memory, as many of the largest images as a step of `max_tokens` takes."""
        if self.processor is None or self.encoders is None:
            return
        from PIL import Image

        side = isqrt(MediaLimits().max_image_pixels)
        largest = Image.new("RGB", (side, side))
        (image,) = self.prepare(self.processor.image_token, [largest]).images
        encoder = self.encoders.encoder
        encoder.encode(
            [image] * min(encoder.max_images_per_pass, max(1, max_tokens // image.num_tokens))
        )

    def prepare(
        self,
        prompt: str | Sequence[int],
        images: Sequence[Image],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> PreparedPrompt:
        """`ImageProcessor.prepare`.

        Raises:
            BadInput: as there, or the model takes no images.
        """
        if self.processor is None:
            self.refuse()
        return self.processor.prepare(
            prompt, images, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )

    def refuse(self) -> NoReturn:
        """Raise `BadInput` that says why there are no images."""
        raise BadInput(f"images are not taken: {self.reason}")


def open_images(
    checkpoint: Checkpoint,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_cache_bytes: int,
    language_model_only: bool = False,
    through_transformers: bool = False,
    input_bits: int = 16,
) -> ImageSupport:
    """Load the processor and the vision tower of a checkpoint that takes images.

    `through_transformers`: the language model is not the engine's own decoder, and masks are causal there.

    Raises:
        BadInput: weights of the tower that are broken.
    """
    folder = checkpoint.folder
    text_alone = ImageSupport(reason=f"{checkpoint.path} is a model of text alone")
    if not isinstance(checkpoint.config.get("vision_config"), dict):
        return text_alone
    # Imported here: transformers' modules take seconds that a model of text alone need not wait for.
    from .load_tower import asks_for_token_types, load_encoder, takes_images

    if not takes_images(checkpoint):
        return text_alone
    if language_model_only:
        return ImageSupport(reason="language_model_only is set: leave it out")
    if through_transformers and asks_for_token_types(checkpoint):
        return ImageSupport(
            reason=f"the images of {checkpoint.path} change masks of attention, which transformers' modules "
            "are not given here"
        )
    if not has_processor(folder):
        return ImageSupport(
            reason=f"{checkpoint.path} has no preprocessor_config.json or processor_config.json"
        )
    try:
        processor = ImageProcessor(
            folder,
            checkpoint.config,
            tokenizer,
            trust_remote_code=checkpoint.trust_remote_code,
        )
    except BadInput as error:
        _log.warning("%s; the model runs on text alone", error)
        return ImageSupport(reason=str(error))
    encoder = load_encoder(checkpoint, device, dtype, input_bits)
    return ImageSupport(processor, EncoderCache(encoder, max_cache_bytes))
