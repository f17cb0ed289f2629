"""Open a checkpoint's processor, vision encoder and cache, and prepare prompts with images for them.

A prompt is vLLM's `TextPrompt` with `images`, as a Python caller writes it. `ImageRules` has the positions
and masks that a language model has for the tokens of images, beside their embeddings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch

from ...base.errors import BadInput, first_line
from ...quant.model.checkpoint import Checkpoint
from ...quant.source.load_processor import has_processor
from ..base.image_input import Images, MediaLimits
from ..model.layers.spec import ImageSpec
from ..scheduling.request import RopePositions
from .encoder import EncoderCache
from .processor import ImageProcessor, PreparedPrompt

if TYPE_CHECKING:
    from .media import ImageSource


class ImageRules:
    """M-RoPE positions by transformers' function, and images that see all of themselves; `streams`: sinks."""

    def __init__(self, spec: ImageSpec, raw: Mapping[str, Any], *, streams: bool) -> None:
        self._spec, self._raw, self._streams = spec, raw, streams

    def rope_positions(self, token_ids: Sequence[int], images: Images) -> RopePositions | None:
        """Positions with `images`; None: indices. BadInput: they cannot be computed."""
        if not images or not hasattr(self._model, "get_rope_index"):
            return None
        if not self._spec.has_mrope:
            raise BadInput(
                "this model's images have positions in time, height and width (M-RoPE), which transformers' "
                "modules take none of here: send text"
            )
        if self._streams:
            raise BadInput(
                "attention sinks rotate by places in the cache, images of this model by their grid (M-RoPE): "
                "leave out window and attention_sinks, or send text"
            )
        types = torch.zeros(1, len(token_ids), dtype=torch.int32)
        for image in images:
            positions, _ = image.embedded_positions(image.offset, image.end)
            types[0, positions] = 1  # an image's tokens
        try:
            positions, deltas = self._model.get_rope_index(
                torch.tensor([list(token_ids)]),
                mm_token_type_ids=types,
                image_grid_thw=torch.tensor([image.grid for image in images]),
            )
        except Exception as error:  # transformers' function checks nothing
            raise BadInput(
                f"{len(images)} images: transformers cannot place them ({first_line(error)}): each needs its "
                "own placeholder, with text between them"
            ) from error
        temporal, height, width = positions[:, 0].tolist()
        return RopePositions((temporal, height, width), int(deltas[0]))

    def bidirectional(self, images: Images) -> tuple[range, ...]:
        """Positions of the images whose tokens attend to each other; those without text between are one."""
        if not self._spec.is_bidirectional:
            return ()
        spans: list[range] = []
        for image in images:
            start = image.offset
            if spans and spans[-1].stop == start:
                start = spans.pop().start
            spans.append(range(start, image.end))
        return tuple(spans)

    @cached_property
    def _model(self) -> Any:
        """A weightless instance of the model's class, for `get_rope_index`; None: transformers has none."""
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        from ...quant.model.auto import read_config

        config = read_config(self._raw)
        kind: Any = MODEL_MAPPING.get(type(config), None)
        if kind is None:
            return None
        model = kind.__new__(kind)
        torch.nn.Module.__init__(model)
        model.config = config
        return model


_KEYS = ("prompt", "prompt_token_ids", "images")


class ImagePrompt(TypedDict):
    """A prompt with images: its text or its token ids, which hold a placeholder for each image."""

    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[Sequence[int]]
    images: NotRequired[Sequence[ImageSource]]


def prepare_prompt(prompt: Mapping[str, Any], support: ImageSupport) -> PreparedPrompt:
    """Load a prompt's images and put placeholders into it; BadInput: an unknown key, or unfit images."""
    unknown = sorted(set(prompt) - set(_KEYS))
    if unknown:
        raise BadInput(f"a prompt has no key {unknown[0]!r}: it takes {', '.join(_KEYS)}")
    texts = [prompt[name] for name in _KEYS[:2] if prompt.get(name) is not None]
    if len(texts) != 1:
        raise BadInput("a prompt has either the key 'prompt' or the key 'prompt_token_ids'")
    sources = prompt.get("images") or ()
    if isinstance(sources, str | bytes) or not isinstance(sources, Sequence):
        raise BadInput("the key 'images' of a prompt is a list")
    processor = support.required()
    from .media import load_images

    return processor.prepare(texts[0], load_images(sources, MediaLimits()))


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """An engine's processor and encoder of images; None, with a `reason`, where images are not taken."""

    processor: ImageProcessor | None = None
    encoders: EncoderCache | None = None
    reason: str = ""

    @property
    def bytes_held(self) -> int:
        return 0 if self.encoders is None else self.encoders.encoder.bytes_held

    @property
    def cache_bytes(self) -> int:
        return 0 if self.encoders is None else self.encoders.max_bytes

    def profile_run(self, max_tokens: int) -> None:
        """Encode, for its peak memory, as many of the largest images as a step of `max_tokens` takes."""
        if self.processor is None or self.encoders is None:
            return
        from PIL import Image

        side = isqrt(MediaLimits().max_image_pixels)
        largest = Image.new("RGB", (side, side))
        (image,) = self.processor.prepare(self.processor.image_token, [largest]).images
        encoder = self.encoders.encoder
        count = min(encoder.max_images_per_pass, max(1, max_tokens // image.num_tokens))
        encoder.encode([image] * count)

    def required(self) -> ImageProcessor:
        """The processor. Raises BadInput: the model takes no images."""
        if self.processor is None:
            raise BadInput(f"images are not taken: {self.reason}")
        return self.processor


def open_images(
    checkpoint: Checkpoint,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_cache_bytes: int,
    language_model_only: bool = False,
    through_transformers: bool = False,
) -> ImageSupport:
    """Processor and vision tower of a checkpoint that takes images; BadInput: the tower's weights are broken.
    `through_transformers`: not by the engine's own decoder, so masks are causal."""
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
        trusted = checkpoint.trust_remote_code
        processor = ImageProcessor(folder, checkpoint.config, tokenizer, trust_remote_code=trusted)
    except BadInput as error:
        _log.warning("%s; the model runs on text alone", error)
        return ImageSupport(reason=str(error))
    encoder = load_encoder(checkpoint, device, dtype)
    return ImageSupport(processor, EncoderCache(encoder, max_cache_bytes))
