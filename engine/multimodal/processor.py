"""The model's own image processor: prompts with images to token ids with placeholders, and pixel tensors.

transformers' processors run on Pillow alone, one image at a time, so that what an image becomes does not
depend on those next to it, and is known by the hash of its pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.errors import BadInput, reported_as
from ...quant.source.load_processor import load_processor
from ..base.image_input import ImageInput, Images

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt with its placeholders expanded: what `Engine.add_request` takes."""

    token_ids: list[int]
    images: Images


@dataclass(frozen=True, slots=True)
class _Pixels:
    """One processed image: the text in its place, and what the vision tower reads."""

    replacement: str
    content_hash: bytes
    tensors: Mapping[str, torch.Tensor]


class ImageProcessor:
    """Expands placeholders by the checkpoint's processor, on any thread. BadInput: none can be built.
    `image_token` is the placeholder of chat templates, `embedded_id` the id of embedded positions."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], tokenizer: Any, *, trust_remote_code: bool
    ) -> None:
        self._folder = folder
        self._processor = load_processor(folder, tokenizer, trust_remote_code=trust_remote_code)
        self._tokenizer = tokenizer
        self.image_token: str = self._processor.image_token
        self.embedded_id = embedded_token_id(config)
        identity = {"class": type(self._processor).__qualname__}
        identity["image_processor"] = self._processor.image_processor.to_dict()
        self._identity = json.dumps(identity, sort_keys=True, default=str).encode()

    def prepare(
        self,
        prompt: str | Sequence[int],
        images: Sequence[Image],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> PreparedPrompt:
        """Put placeholder tokens into a prompt, one `image_token` for each image; or BadInput.
        `add_special_tokens` is false for a chat template's text. Past `max_tokens` no image is processed: its
        pixels take more memory than files do."""
        processed: list[_Pixels] = []
        num_tokens = 0
        for index, image in enumerate(images):
            processed.append(self._process(image, index))
            num_tokens += len(self._replacement_ids(processed[-1]))
            if max_tokens is not None and num_tokens > max_tokens:
                raise BadInput(
                    f"{index + 1} images take {num_tokens} tokens of a prompt: at most {max_tokens}"
                )
        if isinstance(prompt, str):
            pieces = prompt.split(self.image_token)
            self._check_count(len(pieces) - 1, len(processed))
            pairs = zip(processed, pieces[1:], strict=True)
            text = pieces[0] + "".join(pixels.replacement + piece for pixels, piece in pairs)
            token_ids = list(self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        else:
            placeholder = self._tokenizer.convert_tokens_to_ids(self.image_token)
            self._check_count(sum(token == placeholder for token in prompt), len(processed))
            left, token_ids = iter(processed), []
            for token in prompt:
                is_image = token == placeholder
                token_ids += self._replacement_ids(next(left)) if is_image else [token]
        return PreparedPrompt(token_ids, self._placed(token_ids, processed) if processed else ())

    def _process(self, image: Image, index: int) -> _Pixels:
        rgb = image.convert("RGB")
        processor = self._processor
        arguments = processor._merge_kwargs(
            # Newer releases of transformers than 5.17 take the class's own.
            ModelProcessorKwargs=getattr(processor, "valid_processor_kwargs", None),
            tokenizer_init_kwargs=self._tokenizer.init_kwargs,
            return_tensors="pt",
        )["images_kwargs"]
        size = f"{image.width} x {image.height} pixels"
        with reported_as(f"image {index} of {size}: the model's image processor refuses it"):
            layout, *_ = processor.prepare_inputs_layout(images=[rgb], text=[self.image_token])
            outputs, replacements = processor._process_images(layout, **arguments)
        digest = blake2b(self._identity, digest_size=16)
        digest.update(repr(rgb.size).encode())
        digest.update(rgb.tobytes())
        tensors = {name: torch.as_tensor(v) for name, v in outputs.items() if _is_numeric(v)}
        return _Pixels(replacements[0], digest.digest(), tensors)

    def _replacement_ids(self, pixels: _Pixels) -> list[int]:
        return list(self._tokenizer(pixels.replacement, add_special_tokens=False).input_ids)

    def _check_count(self, num_placeholders: int, num_images: int) -> None:
        if num_placeholders != num_images:
            raise BadInput(
                f"the prompt has {num_placeholders} placeholders {self.image_token!r} for {num_images} "
                "images: write one for each image, where it belongs"
            )

    def _placed(self, token_ids: Sequence[int], processed: Sequence[_Pixels]) -> Images:
        positions = [p for p, token in enumerate(token_ids) if token == self.embedded_id]
        counts = [self._replacement_ids(image).count(self.embedded_id) for image in processed]
        if sum(counts) != len(positions) or not all(counts):
            raise BadInput(
                f"{self._folder}: the images take {sum(counts)} tokens {self.embedded_id}, the prompt has "
                f"{len(positions)}: tokenizer and processor contradict each other"
            )
        images: list[ImageInput] = []
        for pixels, count in zip(processed, counts, strict=True):
            taken, positions = positions[:count], positions[count:]
            offset, num_tokens = taken[0], taken[-1] + 1 - taken[0]
            embedded = set(taken)
            flags = tuple(position in embedded for position in range(offset, offset + num_tokens))
            # Patches in time, height and width (Qwen).
            grid = pixels.tensors.get("image_grid_thw")
            images.append(
                ImageInput(
                    pixels.content_hash,
                    offset,
                    num_tokens,
                    pixels.tensors,
                    None if grid is None else tuple(grid[0].tolist()),
                    () if all(flags) else flags,
                )
            )
        return tuple(images)


def embedded_token_id(config: Mapping[str, Any]) -> int:
    """Token id of positions that take embeddings, from `config.json`; BadInput: it names none."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(config.get(name), int):
            return config[name]
    raise BadInput(
        "config.json names no image_token_id: which tokens take an image's embeddings is unknown"
    )


def _is_numeric(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)
