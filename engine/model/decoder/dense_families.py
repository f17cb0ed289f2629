"""Dense model families whose configs are completed by transformers' classes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...planner.model.families import Family
from ...planner.model.shapes import ModelShape
from ..spec.names import Names
from ..spec.spec import NotCovered, Temperature
from .family import (
    BIASED_ATTENTION,
    QK_NORM,
    Choices,
    Config,
    DecoderFamily,
    is_sliding,
    ropes,
    with_mrope,
)

_POST_NORMS = Names(
    input_norm="",
    post_attention_norm="post_attention_layernorm",
    mlp_norm="",
    post_mlp_norm="post_feedforward_layernorm",
)
_SANDWICH_NORMS = Names(
    gate_up=("mlp.gate_up_proj",),
    post_attention_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    post_mlp_norm="post_mlp_layernorm",
)
GEMMA_NORMS = Names(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
HUNYUAN = Names(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")


def _plain(_: ModelShape, config: Config) -> Choices:
    return ropes(config)


def _sliding_where_set(config: Config) -> tuple[int | None, ...]:
    return (config.get("sliding_window"),) * config["num_hidden_layers"]


def _smollm3(_: ModelShape, config: Config) -> Choices:
    return ropes(config, [bool(flag) for flag in config["no_rope_layers"]])


def _ministral3(_: ModelShape, config: Config) -> Choices:
    rope = config["rope_parameters"]
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta:
        return ropes(config)
    if not original:
        raise NotCovered("config.json: llama_4_scaling_beta needs original_max_position_embeddings")
    temperature = Temperature(original, beta, first=0, everywhere=True)
    return {**ropes(config), "temperature": temperature}


def _olmo(_: ModelShape, config: Config) -> Choices:
    return {**ropes(config), "names": _POST_NORMS, "qk_norm_whole": True}


def _exaone4(_: ModelShape, config: Config) -> Choices:
    has_rope = None if config.get("sliding_window") is None else is_sliding(config)
    return {**ropes(config, has_rope), "names": _POST_NORMS}


def granite_scales(config: Config) -> Choices:
    """Granite's multipliers of embeddings, scores, residual branches and logits."""
    return {
        "attention_scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": 1.0 / float(config["logits_scaling"]),
    }


def _granite(_: ModelShape, config: Config) -> Choices:
    return {**ropes(config), **granite_scales(config)}


def _glm(_: ModelShape, config: Config) -> Choices:
    names = Names(gate_up=("mlp.gate_up_proj",))
    return {**ropes(config), "names": names, "rotary_interleaved": True}


def _glm4(_: ModelShape, config: Config) -> Choices:
    return {**ropes(config), "names": _SANDWICH_NORMS, "rotary_interleaved": True}


def _glm4v(shape: ModelShape, config: Config) -> Choices:
    return with_mrope(_glm4(shape, config), config, (8, 12, 12))


def _qwen2_vl(_: ModelShape, config: Config) -> Choices:
    return with_mrope(ropes(config), config, (16, 24, 24))


def _qwen3_vl(_: ModelShape, config: Config) -> Choices:
    return with_mrope(ropes(config), config, (24, 20, 20), interleave=True)


def _ernie(_: ModelShape, config: Config) -> Choices:
    return {**ropes(config), "rotary_interleaved": True}


def hunyuan_ropes(config: Config) -> Choices:
    """RoPE of Hunyuan: `dynamic` with `alpha` is a fixed base, by which NTK-aware scaling is applied once."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        config = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return ropes(config)


def _hunyuan(_: ModelShape, config: Config) -> Choices:
    return {**hunyuan_ropes(config), "names": HUNYUAN, "qk_norm_after_rotation": True}


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


def _gemma(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        "activation": config.get("hidden_activation") or config["hidden_act"],
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(shape.hidden_size),
    }


_BIASED = Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_COHERE = Family(
    qkv_bias="attention_bias", output_bias="attention_bias", norms_per_layer=1, layer_norm=True
)

DENSE_FAMILIES: Mapping[str, DecoderFamily] = {
    "cohere": DecoderFamily(_cohere, _COHERE),
    "cohere2": DecoderFamily(_cohere, _COHERE),
    "ernie4_5": DecoderFamily(
        _ernie, Family(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias")
    ),
    "exaone4": DecoderFamily(_exaone4, Family(qk_norm=True)),
    "gemma": DecoderFamily(_gemma, BIASED_ATTENTION),
    "glm": DecoderFamily(_glm, Family(qkv_bias="attention_bias")),
    "glm4": DecoderFamily(_glm4, Family(qkv_bias="attention_bias", norms_per_layer=4)),
    "glm4v_text": DecoderFamily(_glm4v, Family(qkv_bias=True, norms_per_layer=4)),
    "granite": DecoderFamily(_granite, _BIASED),
    "hunyuan_v1_dense": DecoderFamily(_hunyuan, QK_NORM),
    "ministral": DecoderFamily(_plain, Family()),
    "ministral3": DecoderFamily(_ministral3, Family(windows=_sliding_where_set)),
    "olmo2": DecoderFamily(_olmo, QK_NORM),
    "olmo3": DecoderFamily(_olmo, QK_NORM),
    "qwen2_vl_text": DecoderFamily(_qwen2_vl, Family(qkv_bias=True)),
    "qwen2_5_vl_text": DecoderFamily(_qwen2_vl, Family(qkv_bias=True)),
    "qwen3_vl_text": DecoderFamily(_qwen3_vl, QK_NORM),
    "seed_oss": DecoderFamily(
        _plain,
        Family(qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"),
    ),
    "smollm3": DecoderFamily(_smollm3, _BIASED),
}
