"""DeepSeek V2 and V3, which Kimi K2 is too: latent attention (MLA), group-limited routing; dots.1."""

from __future__ import annotations

from dataclasses import replace

from .choices import QK_NORM, deepseek_router, experts, first_dense, ropes
from .family import Choices, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import NotCovered, RopeSpec, RouterSpec, yarn_scale

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
    router = RouterSpec(
        scoring="sigmoid",
        normalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 2.5)),
        num_groups=config.get("n_group") or 8,
        topk_groups=config.get("topk_group") or 4,
        group_top_k=2,
        correction=True,
    )
    return {**_deepseek(shape, config), "router": router}


def _dots1(shape: ModelShape, config: Config) -> Choices:
    width = config["moe_intermediate_size"]
    shared = width * (config["n_shared_experts"] or 0)
    mixture = experts(config, width, shared, first_dense(config))
    return {
        **ropes(config),
        "shape": replace(shape, experts=mixture),
        "router": deepseek_router(config),
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
)
