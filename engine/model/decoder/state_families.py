"""Families whose layers mix tokens with a constant state beside attention: LFM2, Qwen3-Next, Granite 4, …"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...planner.model.families import Family
from ...planner.model.shapes import ModelShape
from ..spec.mixers import DeltaNetSpec, LayerParts, Mamba2Spec, ShortConvSpec, StateMixer
from ..spec.names import Names
from ..spec.spec import NotCovered, RouterSpec
from .dense_families import granite_scales
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
from .sparse_families import GRANITE_MOE

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
_QWEN_NEXT = Names(
    state_mixer="linear_attn",
    shared_expert="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    fused_experts=("gate_up_proj", "down_proj"),
    fused_transposed=True,
    mtp=("mtp.",),
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


def _check_silu(config: Config, key: str) -> None:
    """Raise `NotCovered` where another activation follows the convolution."""
    if config[key] != "silu":
        raise NotCovered(f"config.json: {key} {config[key]!r} after a convolution is not supported")


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


def _qwen_next(config: Config, *, by_head: bool) -> Choices:
    """Delta nets and gated attention, for Qwen3-Next and Qwen3.5."""
    _check_silu(config, "hidden_act")
    delta_net = DeltaNetSpec(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
        by_head,
    )
    return {
        **ropes(config),
        "norm_offset": 1.0,
        "attention_gate": True,
        "names": _QWEN_NEXT,
        "parts": _parts(config, "linear_attention", delta_net),
    }


def _qwen_mixture(shape: ModelShape, config: Config, dense: Sequence[int] = ()) -> ModelShape:
    width, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    return replace(shape, experts=experts(config, width, shared, dense))


def _qwen3_next(shape: ModelShape, config: Config) -> Choices:
    dense = dense_between(config)
    return {
        **_qwen_next(config, by_head=True),
        "shape": _qwen_mixture(shape, config, dense) if config["num_experts"] else shape,
        "router": RouterSpec(normalize=bool(config["norm_topk_prob"])),
    }


def _qwen3_5(_: ModelShape, config: Config) -> Choices:
    choices = _qwen_next(config, by_head=False)
    return with_mrope(choices, config, (11, 11, 10), interleave=True)


def _without_mlp(config: Config) -> Config:
    """The config with an intermediate size: that of Qwen3.5-MoE has none, for every layer has experts."""
    return {"intermediate_size": config["moe_intermediate_size"], **config}


def _qwen3_5_moe(shape: ModelShape, config: Config) -> Choices:
    return {**_qwen3_5(shape, config), "shape": _qwen_mixture(shape, config)}


def _granite_hybrid(shape: ModelShape, config: Config) -> Choices:
    _check_silu(config, "hidden_act")
    least, most = config["time_step_limit"] or (0.0, math.inf)
    mamba = Mamba2Spec(
        num_heads=config["mamba_n_heads"],
        head_dim=config["mamba_d_head"],
        num_groups=config["mamba_n_groups"],
        state_size=config["mamba_d_state"],
        kernel=config["mamba_d_conv"],
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
        step_limit=(float(least), float(most)),
    )
    inner, names = config["shared_intermediate_size"], GRANITE_MOE
    if config["num_local_experts"]:
        shape = replace(shape, experts=experts(config, shape.intermediate_size, inner))
    shape = replace(shape, intermediate_size=inner)
    has_rope = config["position_embedding_type"] == "rope"
    return {
        **ropes(config, [has_rope] * shape.num_layers),
        **granite_scales(config),
        "shape": shape,
        "names": replace(
            names,
            state_mixer="mamba",
            gate_up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            shared_expert="shared_mlp",
            shared=(("input_linear",), "output_linear"),
        ),
        "parts": _parts(config, "linear_attention", mamba),
    }


_NEMOTRON = Names(
    bases=("backbone.", "model."),
    embedding="embeddings",
    final_norm="norm_f",
    input_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    state_mixer="mixer",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    correction="mixer.gate.e_score_correction_bias",
    experts="mixer.experts",
    expert_latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    shared_expert="mixer.shared_experts",
    shared=(("up_proj",), "down_proj"),
    mtp=("mtp.",),
)


def _nemotron_h(shape: ModelShape, config: Config) -> Choices:
    _check_silu(config, "mamba_hidden_act")
    mamba = Mamba2Spec(
        num_heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        num_groups=config["n_groups"],
        state_size=config["ssm_state_size"],
        kernel=config["conv_kernel"],
        conv_bias=bool(config["use_conv_bias"]),
        bias=bool(config["use_bias"]),
        step_limit=(config["time_step_min"], math.inf),
    )
    parts = {
        "linear_attention": LayerParts(mamba, has_mlp=False),
        "full_attention": LayerParts(has_mlp=False),
        "mlp": LayerParts(has_mixer=False),
        "moe": LayerParts(has_mixer=False),
    }
    kinds = config["layer_types"]
    if "moe" in kinds:
        shared = config["moe_shared_expert_intermediate_size"]
        dense = [index for index, kind in enumerate(kinds) if kind != "moe"]
        mixture = experts(config, config["moe_intermediate_size"], shared, dense)
        shape = replace(shape, experts=mixture)
    return {
        "shape": shape,
        "names": _NEMOTRON,
        "ropes": (None,) * len(kinds),
        "norm_eps": float(config["layer_norm_epsilon"]),
        "activation": config["mlp_hidden_act"],
        "parts": tuple(parts[kind] for kind in kinds),
        "router": deepseek_router(config),
        "expert_latent": config["moe_latent_size"] or 0,
    }


_QK_NORM = Family(qk_norm=True)

STATE_FAMILIES: Mapping[str, DecoderFamily] = {
    "granitemoehybrid": DecoderFamily(_granite_hybrid, BIASED_ATTENTION, with_states=True),
    "lfm2": DecoderFamily(_lfm2, _QK_NORM, with_states=True),
    "lfm2_moe": DecoderFamily(_lfm2_moe, _QK_NORM, with_states=True),
    "nemotron_h": DecoderFamily(
        _nemotron_h, Family(gated_mlp=False, mlp_bias="mlp_bias"), with_states=True
    ),
    "qwen3_5_moe_text": DecoderFamily(
        _qwen3_5_moe, QK_NORM, with_states=True, prepare=_without_mlp
    ),
    "qwen3_5_text": DecoderFamily(_qwen3_5, QK_NORM, with_states=True),
    "qwen3_next": DecoderFamily(_qwen3_next, QK_NORM, with_states=True),
}
