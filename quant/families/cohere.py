"""Command R and Command A: layer norms without bias, attention and MLP in parallel."""

from __future__ import annotations

from dataclasses import replace

from .choices import BIASED_ATTENTION, is_sliding, ropes
from .family import (
    GGUF_ATTENTION,
    GGUF_LAYER_NORM,
    GGUF_MLP,
    Choices,
    GgufRules,
    ModelFamily,
)
from .shape_rules import Config
from .shapes import ModelShape
from .spec_parts import Names, NotCovered


def _cohere(_: ModelShape, config: Config) -> Choices:
    """Command R and, with RoPE in sliding-window layers alone, Command A."""
    if config.get("use_qk_norm"):
        raise NotCovered("config.json: use_qk_norm of Cohere is not supported")
    return {
        **ropes(config, is_sliding(config) if config.get("layer_types") else None),
        "names": Names(mlp_norm=""),
        "norm_eps": float(config["layer_norm_eps"]),
        "norm_bias": False,
        "rotary_interleaved": True,
        "parallel": True,
        "logit_scale": float(config["logit_scale"]),
    }


_RULES = replace(BIASED_ATTENTION, norms_per_layer=1, layer_norm=True)

FAMILIES = (
    ModelFamily(
        "cohere",
        _RULES,
        _cohere,
        gguf=GgufRules(
            "command-r",
            stems=("input_layernorm", *GGUF_ATTENTION, *GGUF_MLP),
            epsilon=("layer_norm_eps", GGUF_LAYER_NORM),
            keys={"logit_scale": "logit_scale"},
            constants={"use_qk_norm": False},
        ),
    ),
    ModelFamily("cohere2", _RULES, _cohere),
)
