"""Vision towers and what wraps any language model: foldable pairs of blocks, tokens of images.

LLaVA, InternVL, Idefics 3, SmolVLM and Aria; wrappers of one language model are in its file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import ceil, sqrt

from .family import ImageSettings, ImageTokens, ModelFamily
from .layer_map import Fold, LayerMap


def _llava(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """A square crop, whatever the resolution."""
    patch = settings.vision_size("patch_size", 14)
    side = settings.side("crop_size", settings.vision_size("image_size", 336)) // patch
    return ImageTokens(side**2, side**2 + 1, 1, f"{side} x {side}")


def _anyres(
    settings: ImageSettings, width: int, height: int, *, is_onevision: bool = False
) -> ImageTokens:
    """The whole image, and tiles of the best resolution less its padding, with a newline after each row."""
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


# By the names of transformers' modules: CLIP and SigLIP (LLaVA, Gemma 3, SmolVLM), Pixtral, InternVL and
# Qwen-VL. Linears that read one input are the targets of one fold; a linear that is not named here is
# quantized without scales. A test holds each fold against the module itself.
_TOWER_FOLDS = (
    Fold("layer_norm1", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fold("layer_norm2", ("mlp.fc1",)),
    Fold("self_attn.v_proj", ("self_attn.out_proj",)),
    Fold("attention_norm", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
    Fold("attention.v_proj", ("attention.o_proj",)),
    Fold("ffn_norm", ("feed_forward.gate_proj", "feed_forward.up_proj")),
    Fold("feed_forward.up_proj", ("feed_forward.down_proj",)),
    Fold("layernorm_before", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
    Fold("attention.v_proj", ("attention.projection_layer",)),
    Fold("layernorm_after", ("mlp.fc1",)),
    Fold("norm1", ("attn.qkv",)),
    Fold("norm2", ("mlp.gate_proj", "mlp.up_proj")),
    Fold("norm2", ("mlp.fc1",)),
    Fold("norm2", ("mlp.linear_fc1",)),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
)


def vision_map(linears: Sequence[str], names: Collection[str]) -> LayerMap:
    """The map of a tower's block, or a projector; linears in order of modules, `names` of tensors."""
    groups: list[tuple[str, ...]] = []
    for linear in linears:
        shared = next((f.targets for f in _TOWER_FOLDS if linear in f.targets), (linear,))
        shared = shared if set(shared) <= set(linears) else (linear,)
        groups += [shared] if shared not in groups else []
    folds = tuple(
        fold
        for fold in _TOWER_FOLDS
        if f"{fold.source}.weight" in names and set(fold.targets) <= set(linears)
    )
    return LayerMap(tuple(groups), folds, frozenset())


FAMILIES = (
    ModelFamily("llava", image_tokens=_llava),
    ModelFamily("llava_next", image_tokens=_anyres),
    ModelFamily("llava_onevision", image_tokens=partial(_anyres, is_onevision=True)),
    ModelFamily("internvl", image_tokens=_internvl, ties_wrapped=True),
    ModelFamily("idefics3", image_tokens=_idefics),
    ModelFamily("smolvlm", image_tokens=_idefics),
    ModelFamily("aria", splits_experts=True),
)
