"""Mistral, Mixtral, Ministral, and Pixtral's tower before Mistral 3."""

from __future__ import annotations

from math import ceil

from .choices import plain_ropes, ropes, same_rope
from .family import (
    GGUF_ATTENTION,
    GGUF_DENSE,
    GGUF_EXPERTS,
    GGUF_NORMS,
    Choices,
    GgufRules,
    ImageSettings,
    ImageTokens,
    ModelFamily,
)
from .shape_rules import Config, ShapeRules, sliding_everywhere
from .shapes import ModelShape
from .spec_parts import Names, NotCovered, Temperature

_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

MISTRAL = ModelFamily(
    "mistral",
    ShapeRules({**_DEFAULTS, "sliding_window": 4096}, sliding_everywhere),
    same_rope,
    gguf=GgufRules("llama", GGUF_DENSE, permuted=True, slides=True, default_window=4096),
)

_BLOCK = "block_sparse_moe"


def _mixtral(shape: ModelShape, config: Config) -> Choices:
    return {
        **same_rope(shape, config, 1e6),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "names": Names(
            router=f"{_BLOCK}.gate", experts=f"{_BLOCK}.experts", expert=("w1", "w3", "w2")
        ),
    }


MIXTRAL = ModelFamily(
    "mixtral",
    ShapeRules({**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}, sliding_everywhere),
    _mixtral,
    gguf=GgufRules(
        "llama",
        stems=(
            *(*GGUF_NORMS, *GGUF_ATTENTION, f"{_BLOCK}.gate"),
            *(f"{_BLOCK}.experts.w{number}" for number in (1, 2, 3)),
        ),
        permuted=True,
        keys=GGUF_EXPERTS | {"num_local_experts": "expert_count"},
    ),
)

MINISTRAL = ModelFamily("ministral", ShapeRules(), plain_ropes)


def _ministral3(_: ModelShape, config: Config) -> Choices:
    rope = config["rope_parameters"]
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta:
        return ropes(config)
    if not original:
        raise NotCovered("config.json: llama_4_scaling_beta needs original_max_position_embeddings")
    temperature = Temperature(original, beta, first=0, everywhere=True)
    return {**ropes(config), "temperature": temperature}


MINISTRAL3 = ModelFamily("ministral3", ShapeRules(windows=sliding_everywhere), _ministral3)


def _pixtral(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """Patches of the image shrunk to the longest edge, with a break after each row."""
    longest = settings.side("size", settings.vision_size("image_size", 1540))
    patch = settings.vision_size("patch_size", 14)
    merge = int(settings.config.get("spatial_merge_size", 1))
    ratio = max(height / longest, width / longest, 1)
    columns, rows = (ceil(int(side / ratio) / (patch * merge)) for side in (width, height))
    patches = rows * columns * merge**2
    return ImageTokens(rows * (columns + 1), patches, 1, f"{rows} x ({columns} + 1)")


MISTRAL3 = ModelFamily("mistral3", image_tokens=_pixtral, ties_wrapped=True)

FAMILIES = (MISTRAL, MIXTRAL, MINISTRAL, MINISTRAL3, MISTRAL3)
