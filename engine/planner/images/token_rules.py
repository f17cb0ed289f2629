"""Tokens of an image by its resolution, by the rule of each family's image processor in transformers.

A rule reads `config.json` and, where there is one, the checkpoint's `preprocessor_config.json`; what both
leave out is the default of the family's released checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any

from ....quant.base.errors import BadInput


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """What one image becomes.

    Attributes:
        num_tokens: in the prompt, with the separators that the processor writes between rows and tiles.
        num_patches: that the vision tower reads.
        num_tiles: parts that attend only within themselves; 1 for a whole image.
        formula: the count with its numbers.
    """

    num_tokens: int
    num_patches: int
    num_tiles: int
    formula: str


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Settings of a checkpoint's processor, looked up in its own order of files."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]

    @property
    def vision(self) -> Mapping[str, Any]:
        """`vision_config`."""
        return self.config.get("vision_config") or {}

    def side(self, name: str, default: int) -> int:
        """A size of the processor in pixels: a number, or the longest of its sides."""
        value = self.processor.get(name, default)
        return int(max(value.values()) if isinstance(value, Mapping) else value)

    def vision_size(self, name: str, default: int) -> int:
        value = self.vision.get(name, default)
        return int(max(value) if isinstance(value, list) else value)


Rule = Callable[[ImageSettings, int, int], ImageTokens]


def image_tokens(settings: ImageSettings, width: int, height: int) -> ImageTokens | None:
    """The tokens of an image of `width` x `height`; None for a model type without a rule.

    Raises:
        BadInput: an aspect ratio that the family's processor refuses.
    """
    rule = RULES.get(str(settings.config.get("model_type")))
    return None if rule is None else rule(settings, width, height)


def _qwen(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """`smart_resize`: multiples of patch x merge, within a range of pixels."""
    patch = settings.vision_size("patch_size", 14)
    merge = settings.vision_size("spatial_merge_size", 2)
    size = settings.processor.get("size") or {}
    least = (
        settings.processor.get("min_pixels")
        or size.get("shortest_edge")
        or 4 * (patch * merge) ** 2
    )
    most = (
        settings.processor.get("max_pixels")
        or size.get("longest_edge")
        or 16384 * (patch * merge) ** 2
    )
    if max(height, width) > 200 * min(height, width):
        raise BadInput(f"an image of {width}x{height}: this model takes aspect ratios up to 200")
    factor = patch * merge
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > most:
        scale = sqrt(height * width / most)
        high = max(factor, floor(height / scale / factor) * factor)
        wide = max(factor, floor(width / scale / factor) * factor)
    elif high * wide < least:
        scale = sqrt(least / (height * width))
        high, wide = ceil(height * scale / factor) * factor, ceil(width * scale / factor) * factor
    patches = (high // patch) * (wide // patch)
    return ImageTokens(
        patches // merge**2, patches, 1, f"{wide}/{factor} x {high}/{factor} after resizing"
    )


def _llava(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """A square crop, whatever the resolution."""
    patch = settings.vision_size("patch_size", 14)
    side = settings.side("crop_size", settings.vision_size("image_size", 336)) // patch
    return ImageTokens(side**2, side**2 + 1, 1, f"{side} x {side}")


def _anyres(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """LLaVA-NeXT and OneVision: the whole image, and tiles of the best of some resolutions, less the padding,
    with a newline after each row."""
    is_onevision = settings.config.get("model_type") == "llava_onevision"
    patch = settings.vision_size("patch_size", 14)
    tile = settings.side("size", settings.vision_size("image_size", 384 if is_onevision else 336))
    pinpoints = settings.processor.get("image_grid_pinpoints") or settings.config.get(
        "image_grid_pinpoints"
    )
    default = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    best_high, best_wide = _best_resolution(width, height, pinpoints or default)
    side = tile // patch
    rows, columns = side * (best_high // tile), side * (best_wide // tile)
    num_tiles = 1 + (best_high // tile) * (best_wide // tile)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if is_onevision:
        aspect = str(settings.config.get("vision_aspect_ratio", "anyres_max_9"))
        ratio = sqrt(rows * columns / (int(aspect.rpartition("_")[2]) * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    formula = f"{side} x {side} of the whole + {rows} x ({columns} + 1) of {num_tiles - 1} tiles"
    return ImageTokens(side**2 + rows * (columns + 1), num_tiles * side**2, num_tiles, formula)


def _best_resolution(width: int, height: int, choices: list[list[int]]) -> tuple[int, int]:
    """`select_best_resolution`: the most pixels of the image, then the least waste; (height, width)."""

    def rank(choice: list[int]) -> tuple[int, int]:
        high, wide = choice
        scale = min(wide / width, high / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - wide * high

    high, wide = max(choices, key=rank)
    return high, wide


def _fixed(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """Gemma 3: the image is resized to a square and pooled to a number of tokens."""
    tokens = int(settings.config.get("mm_tokens_per_image", 256))
    patches = (
        settings.vision_size("image_size", 896) // settings.vision_size("patch_size", 14)
    ) ** 2
    return ImageTokens(tokens, patches, 1, "mm_tokens_per_image")


def _gemma4(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """The largest size within a budget of patches, in multiples of the pooling kernel."""
    patch = settings.vision_size("patch_size", 16)
    kernel = settings.vision_size("pooling_kernel_size", 3)
    budget = settings.processor.get("max_soft_tokens") or settings.config.get(
        "vision_soft_tokens_per_image", 280
    )
    scale = sqrt(budget * (kernel * patch) ** 2 / (height * width))
    rows = floor(scale * height / (kernel * patch))
    columns = floor(scale * width / (kernel * patch))
    if not rows:
        rows, columns = 1, min(width // height, budget)
    elif not columns:
        rows, columns = min(height // width, budget), 1
    return ImageTokens(
        rows * columns, rows * columns * kernel**2, 1, f"{columns} x {rows} within {budget} tokens"
    )


def _internvl(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """Tiles of the canvas with the nearest aspect ratio, and the whole image where there are several."""
    tile = settings.side("size", settings.vision_size("image_size", 448))
    ratio = float(settings.config.get("downsample_ratio", 0.5))
    patches = (tile // settings.vision_size("patch_size", 14)) ** 2
    tokens = int(settings.config.get("image_seq_length") or patches * ratio**2)
    tiles = 1
    if settings.processor.get("crop_to_patches", True):
        least, most = (
            settings.processor.get(f"{name}_patches", n) for name, n in (("min", 1), ("max", 12))
        )
        columns, rows = _canvas(width, height, tile, least, most)
        tiles += columns * rows if columns * rows > 1 else 0
    return ImageTokens(2 + tiles * tokens, tiles * patches, tiles, f"{tiles} tiles x {tokens} + 2")


def _canvas(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """`get_optimal_tiled_canvas` of GOT-OCR2: columns and rows."""
    grids = sorted(
        (
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if least <= columns * rows <= most
        ),
        key=lambda grid: grid[0] * grid[1],
    )
    best, difference = (1, 1), float("inf")
    for columns, rows in grids:
        distance = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * tile**2 * columns * rows
        if distance < difference or (distance == difference and is_filled):
            best, difference = (columns, rows), distance
    return best


def _idefics(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """Idefics3 and SmolVLM: tiles of a resized image, each between markers, and the whole image."""
    longest = settings.side("size", 4 * 364)
    tile = settings.side("max_image_size", settings.vision_size("image_size", 364))
    patches = (tile // settings.vision_size("patch_size", 14)) ** 2
    tokens = int(settings.processor.get("image_seq_len") or 0)
    tokens = tokens or patches // int(settings.config.get("scale_factor", 2)) ** 2
    rows = columns = 0
    if settings.processor.get("do_image_splitting", True):
        columns, rows = (ceil(side / tile) for side in _scaled(width, height, longest))
        if rows * columns == 1:
            rows = columns = 0
    tiles = rows * columns + 1
    count = tokens + 3 + rows * (columns * (tokens + 2) + 1)
    formula = f"{tokens} + 3 of the whole + {rows} x ({columns} x ({tokens} + 2) + 1)"
    return ImageTokens(count, tiles * patches, tiles, formula)


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height with `longest` as the longer side; the other is even."""
    ratio = width / height
    if width >= height:
        wide, high = longest, int(longest / ratio)
        high += high % 2
    else:
        high, wide = longest, int(longest * ratio)
        wide += wide % 2
    return max(wide, 1), max(high, 1)


def _pixtral(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """Patches of the image shrunk to the longest edge, with a break after each row."""
    longest = settings.side("size", settings.vision_size("image_size", 1540))
    patch = settings.vision_size("patch_size", 14)
    merge = int(settings.config.get("spatial_merge_size", 1))
    ratio = max(height / longest, width / longest, 1)
    columns, rows = (ceil(int(side / ratio) / (patch * merge)) for side in (width, height))
    patches = rows * columns * merge**2
    return ImageTokens(rows * (columns + 1), patches, 1, f"{rows} x ({columns} + 1)")


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
        ),
        _qwen,
    ),
    "llava": _llava,
    "llava_next": _anyres,
    "llava_onevision": _anyres,
    "gemma3": _fixed,
    "gemma4": _gemma4,
    "internvl": _internvl,
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics),
    "mistral3": _pixtral,
}  # fmt: skip
"""By `model_type`."""
