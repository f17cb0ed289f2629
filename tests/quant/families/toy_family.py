"""A family that nobody has: Granite's modules under another name, in one file as every family is."""

from __future__ import annotations

from llmopt.quant.families.choices import same_rope
from llmopt.quant.families.family import (
    GGUF_DENSE,
    Choices,
    GgufRules,
    ImageSettings,
    ImageTokens,
    ModelFamily,
)
from llmopt.quant.families.shape_rules import Config, ShapeRules
from llmopt.quant.families.shapes import ModelShape


def _choices(shape: ModelShape, config: Config) -> Choices:
    return {
        **same_rope(shape, config),
        "attention_scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": 1.0 / float(config["logits_scaling"]),
    }


def _quarter(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    return ImageTokens(width * height // 4, width * height, 1, f"{width} x {height} / 4")


FAMILIES = (
    ModelFamily(
        "toy",
        ShapeRules({"max_position_embeddings": 256, "embedding_multiplier": 3.0}),
        _choices,
        gguf=GgufRules("llama", GGUF_DENSE, permuted=True),
        image_tokens=_quarter,
        other_names={"toy_of_old": {"residual_multiplier": 1.0}},
    ),
)
