"""Mixture-of-experts families whose configs are completed by transformers' classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...planner.model.families import Family
from ...planner.model.shapes import ModelShape
from ..spec.names import Names
from ..spec.spec import NotCovered, RouterSpec
from .dense_families import HUNYUAN, granite_scales, hunyuan_ropes
from .family import (
    BIASED_ATTENTION,
    QK_NORM,
    Choices,
    Config,
    DecoderFamily,
    deepseek_router,
    dense_between,
    experts,
    ropes,
    with_mrope,
)

_MIXTRAL_BLOCK = "block_sparse_moe"
GRANITE_MOE = Names(
    router=f"{_MIXTRAL_BLOCK}.router.layer",
    experts=_MIXTRAL_BLOCK,
    fused_experts=("input_linear.weight", "output_linear.weight"),
    fused_transposed=True,
)


def _first_dense(config: Config) -> range:
    return range(min(config["first_k_dense_replace"], config["num_hidden_layers"]))


def _qwen2_moe(shape: ModelShape, config: Config) -> Choices:
    mixture = experts(
        config,
        config["moe_intermediate_size"],
        config["shared_expert_intermediate_size"],
        dense_between(config),
    )
    return {
        **ropes(config),
        "shape": replace(shape, experts=mixture),
        "names": Names(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
        "router": RouterSpec(normalize=bool(config["norm_topk_prob"])),
    }


def _qwen3_vl_moe(shape: ModelShape, config: Config) -> Choices:
    mixture = experts(config, config["moe_intermediate_size"], dense_layers=dense_between(config))
    return {
        **with_mrope(ropes(config), config, (24, 20, 20), interleave=True),
        "shape": replace(shape, experts=mixture),
        "names": Names(fused_experts=("gate_up_proj", "down_proj")),
    }


def _granitemoe(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        **granite_scales(config),
        "shape": replace(shape, experts=experts(config, shape.intermediate_size)),
        "names": GRANITE_MOE,
    }


def _glm4_moe(shape: ModelShape, config: Config) -> Choices:
    width = config["moe_intermediate_size"]
    shared = width * (config["n_shared_experts"] or 0)
    mixture = experts(config, width, shared, _first_dense(config))
    return {
        **ropes(config),
        "shape": replace(shape, experts=mixture, qk_norm=bool(config.get("use_qk_norm"))),
        "router": deepseek_router(config),
        "mtp_layers": True,
    }


def _dots1(shape: ModelShape, config: Config) -> Choices:
    width = config["moe_intermediate_size"]
    shared = width * (config["n_shared_experts"] or 0)
    mixture = experts(config, width, shared, _first_dense(config))
    return {
        **ropes(config),
        "shape": replace(shape, experts=mixture),
        "router": deepseek_router(config),
    }


def _minimax_m2(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        "shape": replace(shape, experts=experts(config, shape.intermediate_size)),
        "names": Names(
            router=f"{_MIXTRAL_BLOCK}.gate",
            correction=f"{_MIXTRAL_BLOCK}.e_score_correction_bias",
            experts=f"{_MIXTRAL_BLOCK}.experts",
            expert=("w1", "w3", "w2"),
        ),
        "router": RouterSpec(scoring="sigmoid", correction=True),
        "qk_norm_whole": True,
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
        "names": Names(
            correction="mlp.moe_statics.e_score_correction_bias",
            mtp=("mtp_",),
        ),
        "router": RouterSpec(correction=True),
        "rotary_interleaved": True,
    }


def _glm4v_moe(shape: ModelShape, config: Config) -> Choices:
    return with_mrope(_glm4_moe(shape, config), config, (8, 12, 12))


def _hunyuan_moe(shape: ModelShape, config: Config) -> Choices:
    inner = shape.intermediate_size
    return {
        **hunyuan_ropes(config),
        "shape": replace(shape, experts=experts(config, inner, inner)),
        "names": replace(HUNYUAN, router="mlp.gate.wg", shared_expert="mlp.shared_mlp"),
        "qk_norm_after_rotation": True,
    }


SPARSE_FAMILIES: Mapping[str, DecoderFamily] = {
    "dots1": DecoderFamily(_dots1, QK_NORM),
    "ernie4_5_moe": DecoderFamily(_ernie_moe, Family()),
    "glm4_moe": DecoderFamily(_glm4_moe, Family(qkv_bias="attention_bias")),
    "glm4v_moe_text": DecoderFamily(_glm4v_moe, Family(qkv_bias="attention_bias")),
    "granitemoe": DecoderFamily(_granitemoe, BIASED_ATTENTION),
    "hunyuan_v1_moe": DecoderFamily(_hunyuan_moe, QK_NORM),
    "minimax_m2": DecoderFamily(_minimax_m2, Family(qk_norm=True)),
    "qwen2_moe": DecoderFamily(_qwen2_moe, Family(qkv_bias="qkv_bias")),
    "qwen3_vl_moe_text": DecoderFamily(_qwen3_vl_moe, QK_NORM),
}
