"""Families with experts: DeepSeek and Kimi K2 (MLA), dots.1, GLM-4, Hunyuan, ERNIE 4.5, MiniMax-M2, gpt-oss.

GLM-4, Hunyuan and ERNIE have dense models too; dense layers are those before the first with experts.
"""

from __future__ import annotations

from dataclasses import replace

from .choices import (
    BIASED_ATTENTION,
    QK_NORM,
    deepseek_router,
    experts,
    first_dense,
    ropes,
    same_rope,
    with_mrope,
)
from .family import Choices, ModelFamily
from .shape_rules import Config, ShapeRules, full_every
from .shapes import ModelShape
from .spec_parts import CLAMPED_SWIGLU, Names, NotCovered, RopeSpec, RouterSpec, yarn_scale

_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "attention_bias": False,
}


def _deepseek(shape: ModelShape, config: Config) -> Choices:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise NotCovered("config.json: biases in a DeepSeek model are not supported")
    assert shape.latent is not None
    rope = RopeSpec.from_config(config)
    scale = shape.latent.query_dim**-0.5
    if rope.kind != "default" and (weight := rope.parameters.get("mscale_all_dim")):
        scale *= yarn_scale(rope.parameters["factor"], weight) ** 2
    return {
        "ropes": (rope,) * shape.num_layers,
        "rotary_width": shape.latent.rope_dim,
        "rotary_interleaved": bool(config.get("rope_interleave", True)),
        "attention_scale": scale,
        "mtp_layers": True,
    }


def _deepseek_v2(shape: ModelShape, config: Config) -> Choices:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise NotCovered(f"config.json: topk_method {method!r} is not supported")
    grouped = method == "group_limited_greedy"
    router = RouterSpec(
        normalize=False,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=config["n_group"] if grouped else 1,
        topk_groups=config["topk_group"] if grouped else 1,
    )
    return {**_deepseek(shape, config), "router": router}


def _deepseek_v3(shape: ModelShape, config: Config) -> Choices:
    usual = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    groups = {"n_group": config.get("n_group") or 8, "topk_group": config.get("topk_group") or 4}
    router = deepseek_router({**usual, **config, **groups})
    return {**_deepseek(shape, config), "router": router}


def _dots1(shape: ModelShape, config: Config) -> Choices:
    """Experts of DeepSeek-V3 after plain attention: dots.1 and GLM-4.5."""
    width = config["moe_intermediate_size"]
    shared = width * (config["n_shared_experts"] or 0)
    mixture = experts(config, width, shared, first_dense(config))
    return {
        **ropes(config),
        "shape": replace(shape, experts=mixture),
        "router": deepseek_router(config),
    }


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


def _glm4_moe(shape: ModelShape, config: Config) -> Choices:
    shape = replace(shape, qk_norm=bool(config.get("use_qk_norm")))
    return {**_dots1(shape, config), "mtp_layers": True}


_GLM_RULES = ShapeRules(qkv_bias="attention_bias")

_HUNYUAN_NAMES = Names(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")


def _hunyuan_ropes(config: Config) -> Choices:
    """RoPE, where `dynamic` with `alpha` is a fixed base, by which NTK-aware scaling is applied once."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        config = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return ropes(config)


def _hunyuan(_: ModelShape, config: Config) -> Choices:
    return {**_hunyuan_ropes(config), "names": _HUNYUAN_NAMES, "qk_norm_after_rotation": True}


def _hunyuan_moe(shape: ModelShape, config: Config) -> Choices:
    inner = shape.intermediate_size
    return {
        **_hunyuan_ropes(config),
        "shape": replace(shape, experts=experts(config, inner, inner)),
        "names": replace(_HUNYUAN_NAMES, router="mlp.gate.wg", shared_expert="mlp.shared_mlp"),
        "qk_norm_after_rotation": True,
    }


def _ernie_moe(shape: ModelShape, config: Config) -> Choices:
    if config["use_bias"]:
        raise NotCovered("config.json: use_bias of ERNIE's experts is not supported")
    layers, step = range(config["num_hidden_layers"]), config["moe_layer_interval"]
    first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
    dense = [i for i in layers if (i + 1) % step or not first <= i <= last]
    width = config["moe_intermediate_size"]
    mixture = experts(config, width, width * config["moe_num_shared_experts"], dense)
    return {
        **ropes(config),
        "shape": replace(shape, experts=mixture),
        "names": Names(correction="mlp.moe_statics.e_score_correction_bias", mtp=("mtp_",)),
        "router": RouterSpec(correction=True),
        "rotary_interleaved": True,
    }


_BLOCK = "block_sparse_moe"


def _minimax_m2(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        "shape": replace(shape, experts=experts(config, shape.intermediate_size)),
        "names": Names(
            router=f"{_BLOCK}.gate",
            correction=f"{_BLOCK}.e_score_correction_bias",
            experts=f"{_BLOCK}.experts",
            expert=("w1", "w3", "w2"),
        ),
        "router": RouterSpec(scoring="sigmoid", correction=True),
        "qk_norm_whole": True,
    }


def _gpt_oss(shape: ModelShape, config: Config) -> Choices:
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        stretched = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
        stretched["original_max_position_embeddings"] = 4096
        config = {**config, "rope_parameters": stretched}
    if (config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise NotCovered("config.json: swiglu_alpha and swiglu_limit are fixed at 1.702 and 7")
    return {
        **same_rope(shape, config, 150000.0),
        "names": Names(
            router="mlp.router",
            fused_experts=("gate_up_proj", "down_proj"),
            gate_up_alternates=True,
        ),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "activation": CLAMPED_SWIGLU,
        "router": RouterSpec(bias=True),
    }


FAMILIES = (
    ModelFamily(
        "deepseek_v2",
        ShapeRules(
            {
                **_MLA,
                "max_position_embeddings": 2048,
                "first_k_dense_replace": 0,
                "n_shared_experts": 2,
                "n_routed_experts": 64,
                "moe_intermediate_size": 1407,
            },
            dense_layers=first_dense,
        ),
        _deepseek_v2,
    ),
    ModelFamily(
        "deepseek_v3",
        ShapeRules(
            {
                **_MLA,
                "max_position_embeddings": 4096,
                "first_k_dense_replace": 3,
                "n_shared_experts": 1,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048,
            },
            dense_layers=first_dense,
        ),
        _deepseek_v3,
        other_names={"kimi_k2": {}},
    ),
    ModelFamily("kimi_k25", ties_wrapped=True),
    ModelFamily("dots1", QK_NORM, _dots1),
    ModelFamily("glm", _GLM_RULES, _glm),
    ModelFamily("glm4", replace(_GLM_RULES, norms_per_layer=4), _glm4),
    ModelFamily(
        "glm4v_text", ShapeRules(qkv_bias=True, norms_per_layer=4), with_mrope(_glm4, 8, 12, 12)
    ),
    ModelFamily("glm4_moe", _GLM_RULES, _glm4_moe),
    ModelFamily("glm4v_moe_text", _GLM_RULES, with_mrope(_glm4_moe, 8, 12, 12)),
    ModelFamily("hunyuan_v1_dense", QK_NORM, _hunyuan),
    ModelFamily("hunyuan_v1_moe", QK_NORM, _hunyuan_moe),
    ModelFamily(
        "ernie4_5",
        ShapeRules(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias"),
        lambda _, config: {**ropes(config), "rotary_interleaved": True},
    ),
    ModelFamily("ernie4_5_moe", ShapeRules(), _ernie_moe),
    ModelFamily("minimax_m2", ShapeRules(qk_norm=True), _minimax_m2),
    ModelFamily(
        "gpt_oss",
        replace(
            BIASED_ATTENTION,
            defaults={
                "max_position_embeddings": 131072,
                "head_dim": 64,
                "num_key_value_heads": 8,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "attention_bias": True,
            },
            windows=full_every(2, "sliding_window"),
            expert_bias=True,
            sinks=True,
        ),
        _gpt_oss,
    ),
)
