"""LFM2, Nemotron-H and Granite: short convolutions or Mamba 2 next to attention, dense or with experts.

Granite has multipliers of embeddings, scores, residuals and logits, also without Mamba.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .choices import BIASED_ATTENTION, check_silu, deepseek_router, experts, layer_parts, ropes
from .family import GGUF_DENSE, Choices, GgufRules, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import LayerParts, Mamba2Spec, Names, RouterSpec, ShortConvSpec

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
        "names": _LFM2,
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
        "names": _LFM2,
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
    check_silu(config, "mamba_hidden_act")
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


_BLOCK = "block_sparse_moe"
_EXPERTS = Names(
    router=f"{_BLOCK}.router.layer",
    experts=_BLOCK,
    fused_experts=("input_linear.weight", "output_linear.weight"),
    fused_transposed=True,
)


_GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _scales(config: Config) -> Choices:
    return {
        "attention_scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": 1.0 / float(config["logits_scaling"]),
    }


def _granitemoe(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        **_scales(config),
        "shape": replace(shape, experts=experts(config, shape.intermediate_size)),
        "names": _EXPERTS,
    }


def _granite_hybrid(shape: ModelShape, config: Config) -> Choices:
    check_silu(config, "hidden_act")
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
    inner, names = config["shared_intermediate_size"], _EXPERTS
    if config["num_local_experts"]:
        shape = replace(shape, experts=experts(config, shape.intermediate_size, inner))
    shape = replace(shape, intermediate_size=inner)
    has_rope = config["position_embedding_type"] == "rope"
    return {
        **ropes(config, [has_rope] * shape.num_layers),
        **_scales(config),
        "shape": shape,
        "names": replace(
            names,
            state_mixer="mamba",
            gate_up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            shared_expert="shared_mlp",
            shared=(("input_linear",), "output_linear"),
        ),
        "parts": layer_parts(config, "linear_attention", mamba),
    }


FAMILIES = (
    ModelFamily("lfm2", _QK_NORM, _lfm2, with_states=True),
    ModelFamily("lfm2_moe", _QK_NORM, _lfm2_moe, with_states=True),
    ModelFamily(
        "nemotron_h",
        ShapeRules(gated_mlp=False, mlp_bias="mlp_bias"),
        _nemotron_h,
        with_states=True,
    ),
    ModelFamily(
        "granite",
        replace(BIASED_ATTENTION, mlp_bias="mlp_bias"),
        lambda _, config: {**ropes(config), **_scales(config)},
        gguf=GgufRules(
            "granite",
            GGUF_DENSE,
            permuted=True,
            keys=_GRANITE_SCALES,
            defaults=dict.fromkeys(_GRANITE_SCALES, 1.0),
        ),
        plain_tokenizer=True,
    ),
    ModelFamily("granitemoe", BIASED_ATTENTION, _granitemoe, splits_experts=True),
    ModelFamily(
        "granitemoehybrid", BIASED_ATTENTION, _granite_hybrid, with_states=True, splits_experts=True
    ),
    ModelFamily("granitemoeshared", splits_experts=True),
    ModelFamily("granitemoe_swa", splits_experts=True),
)
