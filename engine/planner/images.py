"""Load of the images of a prompt: their tokens, and memory and time of the vision encoder.

Tokens are counted by the family's rule, or by the checkpoint's processor in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...quant.families.family import ImageSettings, ImageTokens
from ...quant.families.registry import image_tokens, type_of
from ...quant.model.checkpoint import read_json
from .catalog import PlannedModel
from .devices import Device
from .probed_shape import ProbedShape
from .speed import Efficiency

_ASKED = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)")
ELEMENT_BYTES = 2
"""Towers run in 16 bits."""
MAX_IMAGES = 10_000
MAX_SIDE = 100_000


@dataclass(frozen=True, slots=True)
class ImageLoad:
    """The images of each prompt.

    Attributes:
        count: number of images.
        width: pixels of an image; height likewise.
        tokens: tokens of one image.
        vision_parameters: parameters of the tower; projector_parameters those of the projector after it.
        layers: layers of the tower; hidden_size and intermediate_size are its widths.
        text_hidden_size: width of an embedding.
        levels: embeddings of a token: one, and deepstack's.
    """

    count: int
    width: int
    height: int
    tokens: ImageTokens
    vision_parameters: int
    projector_parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    text_hidden_size: int
    levels: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.tokens.num_tokens

    @property
    def weight_bytes(self) -> int:
        return ELEMENT_BYTES * (self.vision_parameters + self.projector_parameters)

    @property
    def embedding_bytes(self) -> int:
        """Embeddings of all images, as the encoder cache keeps them, deepstack's levels included."""
        return ELEMENT_BYTES * self.num_tokens * self.text_hidden_size * self.levels

    @property
    def activation_bytes(self) -> int:
        """Peak of one image in the tower: residual, normed input, q, k, v and the MLP's inner activations."""
        inner = 5 * self.hidden_size + 2 * self.intermediate_size
        return ELEMENT_BYTES * self.tokens.num_patches * inner

    @property
    def flops(self) -> float:
        """FLOP of all images: two per parameter and patch (or token), and attention within each tile."""
        tokens = self.tokens
        per_tile = tokens.num_patches / tokens.num_tiles
        attention = 4 * self.layers * self.hidden_size * per_tile * tokens.num_patches
        linear = self.vision_parameters * tokens.num_patches
        linear += self.projector_parameters * tokens.num_tokens
        return self.count * (2 * linear + attention)

    def encode_seconds(self, device: Device, efficiency: Efficiency) -> float | None:
        """Time to encode the images of one prompt, one after the other, on one device; None if its speed is
        unknown."""
        peak = device.peak_flops(16, "bf16")
        if device.bandwidth is None or not peak:
            return None
        computing = self.flops / (peak * efficiency.compute)
        moving = self.count * self.weight_bytes / (device.bandwidth * efficiency.bandwidth)
        return max(computing, moving) + self.count * self.layers * efficiency.seconds_per_layer


def parse_images(text: str) -> tuple[int, int, int]:
    """Count, width and height of `2x1024x768`; `1024x768` is one image.

    Raises:
        BadInput: another form, or a number out of range.
    """
    match = _ASKED.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(f"--images {text}: give COUNTxWIDTHxHEIGHT, such as 2x1024x768")
    count, width, height = int(match[1] or 1), int(match[2]), int(match[3])
    if not (1 <= count <= MAX_IMAGES and 1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise BadInput(
            f"--images {text}: 1 to {MAX_IMAGES} images with sides of 1 to {MAX_SIDE} pixels"
        )
    return count, width, height


def image_load(
    model: PlannedModel,
    text: str,
    probe: Callable[[Path, int, int], ImageTokens | None] | None = None,
) -> ImageLoad:
    """The load of the images that `--images` asks for.

    Tokens are by the family's rule; without one by `probe`, which asks the checkpoint's processor.

    Raises:
        BadInput: an invalid option, or a model without vision tower or rule.
    """
    count, width, height = parse_images(text)
    vision = model.config.get("vision_config")
    if not isinstance(vision, Mapping) or not isinstance(model.shape, ProbedShape):
        raise BadInput(f"--images: {model.name} has no vision_config: it takes text alone")
    folder = Path(model.source).parent
    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            read = read_json(folder / name)
            settings |= read | (read.get("image_processor") or {})
    tokens = image_tokens(ImageSettings(model.config, settings), width, height)
    if tokens is None and probe is not None:
        tokens = probe(folder, width, height)
    if tokens is None:
        raise BadInput(
            f"--images: no rule for the image tokens of {type_of(model.config)!r}, and no "
            f"processor of transformers next to {model.source} counts them"
        )
    measured = model.shape.measured
    return ImageLoad(
        count,
        width,
        height,
        tokens,
        measured.num_parameters("vision"),
        measured.num_parameters("projector"),
        _first(vision, "depth", "num_hidden_layers"),
        _first(vision, "hidden_size", "embed_dim"),
        _first(vision, "intermediate_size", "hidden_size"),
        model.shape.hidden_size,
        1 + len(vision.get("deepstack_visual_indexes") or ()),
    )


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def probed_image_tokens(folder: Path, width: int, height: int) -> ImageTokens | None:
    """Count by the checkpoint's own processor; None if transformers cannot build it, or it cannot count
    without an image."""
    if not (folder / "preprocessor_config.json").is_file():
        return None
    try:
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        counted = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        count, tiles = counted["num_image_tokens"][0], counted["num_image_patches"][0]
    except Exception:  # transformers may fail in any way here
        return None
    return ImageTokens(count, count, tiles, f"{type(processor).__name__} of transformers")
