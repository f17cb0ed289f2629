"""Loading the tokenizer of a folder or GGUF file, and a checkpoint's processor for images, on Pillow.

The image processors that transformers has for torchvision alone, Llama 4's and Pixtral's, are here. Llama 4
resizes an image without distortion onto a canvas of square tiles, pads it and cuts it; more than one tile are
followed by the whole image as a tile. Source: transformers' `image_processing_llama4.py`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs, ProcessorMixin

from .base.errors import BadInput, first_line
from .families.registry import model_family, type_of
from .gguf.container import GgufFile
from .gguf.read_tokenizer import read_tokenizer
from .model.checkpoint import gguf_file_of

Size = tuple[int, int]
"""Height and width."""


class Llama4ImagesKwargs(ImagesKwargs, total=False):
    """The fields of `preprocessor_config.json` beside the common ones."""

    max_patches: int
    resize_to_max_canvas: bool


_Backend: Any = PilBackend
"""Untyped: its processors take the fields of their configs as arguments, each other ones."""


class Llama4ImageProcessorPil(_Backend):
    """Tiles of an image, [tiles, channels, height, width] in bfloat16's precision, and its grid of tiles."""

    resample = PILImageResampling.BILINEAR
    image_mean = [0.5, 0.5, 0.5]  # noqa: RUF012
    image_std = [0.5, 0.5, 0.5]  # noqa: RUF012
    size = {"height": 336, "width": 336}  # noqa: RUF012
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False
    valid_kwargs = Llama4ImagesKwargs

    def _preprocess(
        self,
        images: list[np.ndarray],
        size: SizeDict,
        max_patches: int,
        resize_to_max_canvas: bool,
        **options: Any,
    ) -> BatchFeature:
        tiles: list[torch.Tensor] = []
        grids: list[Size] = []
        side = int(size.height or 0)
        for image in images:
            canvas = best_canvas(image.shape[-2:], side, max_patches, resize_to_max_canvas)
            inner = canvas
            if not resize_to_max_canvas:
                # Without upscaling, but to a tile at least.
                height, width = image.shape[-2:]
                inner = (
                    min(max(height, side), canvas[0]),
                    min(max(width, side), canvas[1]),
                )
            fitted = self._resized(image, undistorted(image.shape[-2:], inner), options)
            padding = [
                (0, 0),
                *((0, c - f) for c, f in zip(canvas, fitted.shape[-2:], strict=True)),
            ]
            grid = canvas[0] // side, canvas[1] // side
            tiles.append(cut(self._scaled(np.pad(fitted, padding), options), grid))
            if grid != (1, 1):
                whole = self._resized(image, (side, side), options)
                tiles.append(self._scaled(whole, options)[None])
            grids.append(grid)
        return BatchFeature({"pixel_values": torch.cat(tiles), "aspect_ratios": grids})

    def _resized(self, image: np.ndarray, size: Size, options: dict[str, Any]) -> np.ndarray:
        target = SizeDict(height=max(size[0], 1), width=max(size[1], 1))
        return self.resize(image, target, resample=options.get("resample"))

    def _scaled(self, image: np.ndarray, options: dict[str, Any]) -> torch.Tensor:
        """Rescaled and normalized in bfloat16, as the original implementation does."""
        pixels = torch.from_numpy(np.ascontiguousarray(image)).to(torch.bfloat16)
        pixels = pixels * options["rescale_factor"]
        mean, std = (
            torch.tensor(options[name], dtype=torch.bfloat16)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        return (pixels - mean) / std


def canvases(max_tiles: int) -> list[Size]:
    """Grids (rows, columns) of at most `max_tiles` tiles, those of an aspect ratio together."""
    by_ratio: dict[float, list[Size]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            columns = count // rows
            by_ratio.setdefault(rows / columns, []).append((rows, columns))
    return [grid for grids in by_ratio.values() for grid in grids]


def best_canvas(image: Sequence[int], side: int, max_tiles: int, to_max: bool) -> Size:
    """The canvas for an image: the least upscaling, or else the least downscaling; then the least area."""
    sizes = [(rows * side, columns * side) for rows, columns in canvases(max_tiles)]
    scales = [min(height / image[0], width / image[1]) for height, width in sizes]
    upscaling = [scale for scale in scales if scale >= 1]
    if upscaling:
        chosen = max(upscaling) if to_max else min(upscaling)
    else:
        chosen = max(scales)
    fitting = [size for size, scale in zip(sizes, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda size: size[0] * size[1])


def undistorted(image: Sequence[int], target: Size) -> Size:
    """The largest size within `target` of the image's aspect ratio."""
    height_scale, width_scale = target[0] / image[0], target[1] / image[1]
    if width_scale < height_scale:
        return min(math.floor(image[0] * width_scale), target[0]), target[1]
    return target[0], min(math.floor(image[1] * height_scale), target[1])


def cut(image: torch.Tensor, grid: Size) -> torch.Tensor:
    """Tiles [rows * columns, channels, height, width] of an image [channels, height, width], row by row."""
    channels, height, width = image.shape
    rows, columns = grid
    tiles = image.view(channels, rows, height // rows, columns, width // columns)
    return tiles.permute(1, 3, 0, 2, 4).reshape(-1, channels, height // rows, width // columns)


class PixtralProcessor(ProcessorMixin):
    """A row of placeholders for each row of merged patches, with a separator after each and an end token.

    Source: transformers' `processing_pixtral.py`, the part that reads images.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: Any = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.side = patch_size * spatial_merge_size
        self.image_token = image_token
        self.image_break_token, self.image_end_token = image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def _process_images(self, images: Any, **images_kwargs: Any) -> tuple[Any, list[str]]:
        return super()._process_images(images, **{**images_kwargs, "patch_size": self.side})

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **_: Any) -> str:
        height, width = (int(side) // self.side for side in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width
        return self.image_break_token.join([row] * height) + self.image_end_token


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model from `resolve_model`; code of the checkpoint runs only where it is trusted.

    A GGUF file's is the tokenizer.json beside it, else what its own keys describe.

    Raises:
        BadInput: it does not load.
    """
    file = gguf_file_of(model)
    folder = model if file is None else file.parent
    try:
        if file is not None and not (folder / "tokenizer.json").is_file():
            tokenizer = read_tokenizer(GgufFile(file))
        else:
            tokenizer = _from_folder(folder, trust_remote_code)
    except BadInput:
        raise
    except Exception as error:  # transformers and tokenizers raise many types for a broken file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{model}: the tokenizer does not load: {reason}") from error
    # Callers check lengths; silence the tokenizer's warning.
    tokenizer.model_max_length = int(1e30)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    arguments: dict[str, Any] = {}
    if config := _tokenizer_config(folder):
        if _is_plain(folder, config):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        arguments["config"] = config
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code, **arguments
    )


def _is_plain(folder: Path, config: Any) -> bool:
    """Whether its tokenizer.json is all of a tokenizer, so that no model's class need be imported.

    `AutoTokenizer` reads the sources of all models for it: half a second of every start.
    """
    family = model_family(type_of(config))
    if family is None or not family.plain_tokenizer or not (folder / "tokenizer.json").is_file():
        return False
    if hasattr(config, "model_name"):
        return False  # some names have classes replaced, as some types have
    declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return declared["tokenizer_class"] in _PLAIN_CLASSES


def _tokenizer_config(folder: Path) -> Any:
    """Fields of a config that `AutoTokenizer` reads, where the tokenizer names its class; else None.

    Without it, it imports the model type's configuration class, and with that torch's compiler: two seconds
    of every start, for a class that the tokenizer does not need.
    """
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # transformers says what is wrong
    if "tokenizer_class" not in declared or "auto_map" in declared or "auto_map" in model:
        return None
    from transformers import PreTrainedConfig

    keys = ("model_type", "model_name", "tokenizer_class")
    config = PreTrainedConfig.from_dict({key: model[key] for key in keys if key in model})
    config.name_or_path = str(folder)
    return config


_FILES = ("processor_config.json", "preprocessor_config.json")
"""Either describes the image processor."""


def has_processor(folder: Path) -> bool:
    """Whether a checkpoint has the description of an image processor."""
    return any((folder / name).is_file() for name in _FILES)


def load_processor(folder: Path, tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The processor of a checkpoint with image processor and tokenizer, and nothing where it takes more.

    Raises:
        BadInput: there is none, or transformers cannot build it here.
    """
    if not has_processor(folder):
        raise BadInput(
            f"{folder} has no {' or '.join(_FILES)}: without them images cannot be processed"
        )
    try:
        image_processor = _image_processor(folder, trust_remote_code)
        kind = _processor_class(folder, trust_remote_code)
        description, _ = kind.get_processor_dict(folder)
        given = {"image_processor": image_processor, "tokenizer": tokenizer}
        parts = [given.get(name) for name in kind.get_attributes()]
        return _without_checks(kind).from_args_and_dict(parts, description)
    except Exception as error:  # transformers may fail in any way here
        raise BadInput(
            f"{folder}: transformers cannot build its image processor: {first_line(error)}"
        ) from error


def _image_processor(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' image processor for Pillow, or ours where it has none."""
    from transformers import AutoImageProcessor, BaseImageProcessor

    description, _ = BaseImageProcessor.get_image_processor_dict(folder)
    if str(description.get("image_processor_type")).startswith("Llama4ImageProcessor"):
        return Llama4ImageProcessorPil.from_dict(description)
    return AutoImageProcessor.from_pretrained(
        folder, backend="pil", trust_remote_code=trust_remote_code
    )


def _processor_class(folder: Path, trust_remote_code: bool) -> Any:
    """The processor class that the checkpoint's files name, or else the one of its model type."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING,
        processor_class_from_name,
    )

    from .model.checkpoint import read_json

    for name in (*_FILES, "tokenizer_config.json"):
        if (folder / name).is_file():
            named = read_json(folder / name).get("processor_class")
            if named == "PixtralProcessor":
                return PixtralProcessor
            if named and (kind := processor_class_from_name(named)) is not None:
                return kind
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if type(config) not in PROCESSOR_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} has no processor for {type_of(config)!r}"
        )
    kind: Any = PROCESSOR_MAPPING[type(config)]
    return PixtralProcessor if kind.__name__ == "PixtralProcessor" else kind


def _without_checks(kind: Any) -> Any:
    """A subclass that accepts None for the parts that read video and audio, which are not loaded.

    SmolVLM's class asks for a package that writes the numbers of video frames.
    """
    module = sys.modules[kind.__module__]
    if getattr(module, "num2words", True) is None:
        vars(module)["num2words"] = str

    def accept(self: Any, argument_name: str, argument: Any) -> type:
        return type(argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": accept})
