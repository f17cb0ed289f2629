"""LFM2: gated short convolutions beside attention, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from .choices import experts, layer_parts, ropes
from .family import Choices, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import LayerParts, Names, RouterSpec, ShortConvSpec

_NAMES = Names(
    final_norm="embedding_norm",
    input_norm="operator_norm",
    mlp_norm="ffn_norm",
    output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    state_mixer="conv",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    correction="feed_forward.expert_bias",
    experts="feed_forward.experts",
    expert=("w1", "w3", "w2"),
)


def _convolutions(config: Config) -> tuple[LayerParts, ...]:
    convolution = ShortConvSpec(config["conv_L_cache"], bool(config["conv_bias"]))
    return layer_parts(config, "conv", convolution)


def _lfm2(shape: ModelShape, config: Config) -> Choices:
    inner = shape.intermediate_size
    if config.get("block_auto_adjust_ff_dim"):
        inner, step = int(2 * inner / 3), config["block_multiple_of"]
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            inner = -(-int(factor * inner) // step) * step
    return {
        **ropes(config),
        "shape": replace(shape, intermediate_size=inner),
        "names": _NAMES,
        "norm_eps": float(config["norm_eps"]),
        "parts": _convolutions(config),
    }


def _lfm2_moe(shape: ModelShape, config: Config) -> Choices:
    dense = range(min(config["num_dense_layers"], shape.num_layers))
    return {
        **ropes(config),
        "shape": replace(
            shape, experts=experts(config, config["moe_intermediate_size"], dense_layers=dense)
        ),
        "names": _NAMES,
        "norm_eps": float(config["norm_eps"]),
        "parts": _convolutions(config),
        "router": RouterSpec(
            scoring="sigmoid",
            normalize=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
            correction=bool(config["use_expert_bias"]),
            least_sum=1e-6,
        ),
    }


_QK_NORM = ShapeRules(qk_norm=True)

FAMILIES = (
    ModelFamily("lfm2", _QK_NORM, _lfm2, with_states=True),
    ModelFamily("lfm2_moe", _QK_NORM, _lfm2_moe, with_states=True),
)
