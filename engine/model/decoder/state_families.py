"""Families whose layers mix tokens with a constant state beside attention: LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...planner.model.families import Family
from ...planner.model.shapes import ModelShape
from ..spec.mixers import LayerParts, ShortConvSpec, StateMixer
from ..spec.names import Names
from ..spec.spec import NotCovered, RouterSpec
from .family import Choices, Config, DecoderFamily, experts, ropes

_LFM2 = Names(
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


def _parts(config: Config, kind: str, mixer: StateMixer) -> tuple[LayerParts, ...]:
    """What layers are made of, where those of a `kind` have a state and the others attention.

    Raises:
        NotCovered: a layer is neither.
    """
    kinds = config["layer_types"]
    if unknown := sorted({*kinds} - {kind, "full_attention"}):
        raise NotCovered(f"config.json: layer_types holds {unknown[0]!r}, which is not supported")
    return tuple(LayerParts(mixer if each == kind else None) for each in kinds)


def _convolution(config: Config) -> ShortConvSpec:
    return ShortConvSpec(config["conv_L_cache"], bool(config["conv_bias"]))


def _lfm2(shape: ModelShape, config: Config) -> Choices:
    inner = shape.intermediate_size
    if config.get("block_auto_adjust_ff_dim"):
        inner, step = int(2 * inner / 3), config["block_multiple_of"]
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            inner = -(-int(factor * inner) // step) * step
    return {
        **ropes(config),
        "shape": replace(shape, intermediate_size=inner),
        "names": _LFM2,
        "norm_eps": float(config["norm_eps"]),
        "parts": _parts(config, "conv", _convolution(config)),
    }


def _lfm2_moe(shape: ModelShape, config: Config) -> Choices:
    dense = range(min(config["num_dense_layers"], shape.num_layers))
    return {
        **ropes(config),
        "shape": replace(
            shape, experts=experts(config, config["moe_intermediate_size"], dense_layers=dense)
        ),
        "names": _LFM2,
        "norm_eps": float(config["norm_eps"]),
        "parts": _parts(config, "conv", _convolution(config)),
        "router": RouterSpec(
            scoring="sigmoid",
            normalize=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
            correction=bool(config["use_expert_bias"]),
            least_sum=1e-6,
        ),
    }


_QK_NORM = Family(qk_norm=True)

STATE_FAMILIES: Mapping[str, DecoderFamily] = {
    "lfm2": DecoderFamily(_lfm2, _QK_NORM, with_states=True),
    "lfm2_moe": DecoderFamily(_lfm2_moe, _QK_NORM, with_states=True),
}
