"""Hunyuan: QK-norm after RoPE, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from .choices import QK_NORM, experts, ropes
from .family import Choices, ModelFamily
from .shape_rules import Config
from .shapes import ModelShape
from .spec_parts import Names

_NAMES = Names(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")


def _ropes(config: Config) -> Choices:
    """RoPE, where `dynamic` with `alpha` is a fixed base, by which NTK-aware scaling is applied once."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        config = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return ropes(config)


def _hunyuan(_: ModelShape, config: Config) -> Choices:
    return {**_ropes(config), "names": _NAMES, "qk_norm_after_rotation": True}


def _hunyuan_moe(shape: ModelShape, config: Config) -> Choices:
    inner = shape.intermediate_size
    return {
        **_ropes(config),
        "shape": replace(shape, experts=experts(config, inner, inner)),
        "names": replace(_NAMES, router="mlp.gate.wg", shared_expert="mlp.shared_mlp"),
        "qk_norm_after_rotation": True,
    }


FAMILIES = (
    ModelFamily("hunyuan_v1_dense", QK_NORM, _hunyuan),
    ModelFamily("hunyuan_v1_moe", QK_NORM, _hunyuan_moe),
)
