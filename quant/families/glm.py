"""GLM-4: interleaved RoPE, norms after attention and MLP, experts, and M-RoPE behind a vision tower."""

from __future__ import annotations

from dataclasses import replace

from .choices import deepseek_router, experts, first_dense, ropes, with_mrope
from .family import Choices, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import Names

_SANDWICH_NORMS = Names(
    gate_up=("mlp.gate_up_proj",),
    post_attention_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    post_mlp_norm="post_mlp_layernorm",
)


def _glm(_: ModelShape, config: Config) -> Choices:
    names = Names(gate_up=("mlp.gate_up_proj",))
    return {**ropes(config), "names": names, "rotary_interleaved": True}


def _glm4(_: ModelShape, config: Config) -> Choices:
    return {**ropes(config), "names": _SANDWICH_NORMS, "rotary_interleaved": True}


def _glm4v(shape: ModelShape, config: Config) -> Choices:
    return with_mrope(_glm4(shape, config), config, (8, 12, 12))


def _glm4_moe(shape: ModelShape, config: Config) -> Choices:
    width = config["moe_intermediate_size"]
    shared = width * (config["n_shared_experts"] or 0)
    mixture = experts(config, width, shared, first_dense(config))
    return {
        **ropes(config),
        "shape": replace(shape, experts=mixture, qk_norm=bool(config.get("use_qk_norm"))),
        "router": deepseek_router(config),
        "mtp_layers": True,
    }


def _glm4v_moe(shape: ModelShape, config: Config) -> Choices:
    return with_mrope(_glm4_moe(shape, config), config, (8, 12, 12))


_BIASED = ShapeRules(qkv_bias="attention_bias")

FAMILIES = (
    ModelFamily("glm", _BIASED, _glm),
    ModelFamily("glm4", replace(_BIASED, norms_per_layer=4), _glm4),
    ModelFamily("glm4v_text", ShapeRules(qkv_bias=True, norms_per_layer=4), _glm4v),
    ModelFamily("glm4_moe", _BIASED, _glm4_moe),
    ModelFamily("glm4v_moe_text", _BIASED, _glm4v_moe),
)
