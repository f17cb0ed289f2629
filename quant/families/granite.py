"""Granite: multipliers of embeddings, scores, residuals and logits; with experts, and with Mamba 2."""

from __future__ import annotations

import math
from dataclasses import replace

from .choices import BIASED_ATTENTION, check_silu, experts, layer_parts, ropes
from .family import GGUF_DENSE, Choices, GgufRules, ModelFamily
from .shape_rules import Config
from .shapes import ModelShape
from .spec_parts import Mamba2Spec, Names

_BLOCK = "block_sparse_moe"
_EXPERTS = Names(
    router=f"{_BLOCK}.router.layer",
    experts=_BLOCK,
    fused_experts=("input_linear.weight", "output_linear.weight"),
    fused_transposed=True,
)


def _scales(config: Config) -> Choices:
    """Multipliers of embeddings, scores, residual branches and logits."""
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
    ModelFamily(
        "granite",
        replace(BIASED_ATTENTION, mlp_bias="mlp_bias"),
        lambda _, config: {**ropes(config), **_scales(config)},
        gguf=GgufRules(
            "granite",
            GGUF_DENSE,
            permuted=True,
            keys={
                "attention_multiplier": "attention.scale",
                "embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
            },
        ),
        plain_tokenizer=True,
    ),
    ModelFamily("granitemoe", BIASED_ATTENTION, _granitemoe, splits_experts=True),
    ModelFamily(
        "granitemoehybrid",
        BIASED_ATTENTION,
        _granite_hybrid,
        with_states=True,
        splits_experts=True,
    ),
    ModelFamily("granitemoeshared", splits_experts=True),
    ModelFamily("granitemoe_swa", splits_experts=True),
)
