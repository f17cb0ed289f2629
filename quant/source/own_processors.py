"""Processors of images that transformers has for torchvision alone: Llama 4's and Pixtral's, on Pillow.

Llama 4 resizes an image without distortion onto a canvas of square tiles, pads it and cuts it; more than one
tile are followed by the whole image as a tile. Source: transformers' `image_processing_llama4.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs, ProcessorMixin

Size = tuple[int, int]
"""Height and width."""


class Llama4ImagesKwargs(ImagesKwargs, total=False):
    """The fields of `preprocessor_config.json` next to the common ones."""

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
                inner = min(max(height, side), canvas[0]), min(max(width, side), canvas[1])
            fitted = self._resized(image, undistorted(image.shape[-2:], inner), options)
            height, width = fitted.shape[-2:]
            padding = [(0, 0), (0, canvas[0] - height), (0, canvas[1] - width)]
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
    chosen = max(scales) if to_max or not upscaling else min(upscaling)
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
    """Placeholder rows for merged patches, with separators (transformers' `processing_pixtral.py`)."""

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
