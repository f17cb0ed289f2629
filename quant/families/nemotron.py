"""Nemotron-H: layers that are Mamba 2, attention, an MLP or experts, one of them each."""

from __future__ import annotations

import math
from dataclasses import replace

from .choices import check_silu, deepseek_router, experts
from .family import Choices, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import LayerParts, Mamba2Spec, Names

_NAMES = Names(
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
        "names": _NAMES,
        "ropes": (None,) * len(kinds),
        "norm_eps": float(config["layer_norm_epsilon"]),
        "activation": config["mlp_hidden_act"],
        "parts": tuple(parts[kind] for kind in kinds),
        "router": deepseek_router(config),
        "expert_latent": config["moe_latent_size"] or 0,
    }


FAMILIES = (
    ModelFamily(
        "nemotron_h",
        ShapeRules(gated_mlp=False, mlp_bias="mlp_bias"),
        _nemotron_h,
        with_states=True,
    ),
)
