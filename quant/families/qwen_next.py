"""Qwen3-Next and Qwen3.5: gated delta nets beside gated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .choices import QK_NORM, check_silu, dense_between, experts, layer_parts, ropes, with_mrope
from .family import Choices, ModelFamily
from .qwen import smart_resize
from .shape_rules import Config
from .shapes import ModelShape
from .spec_parts import DeltaNetSpec, Names, RouterSpec

_NAMES = Names(
    state_mixer="linear_attn",
    shared_expert="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    fused_experts=("gate_up_proj", "down_proj"),
    fused_transposed=True,
    mtp=("mtp.",),
)


def _delta_nets(config: Config, *, by_head: bool) -> Choices:
    check_silu(config, "hidden_act")
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
        "names": _NAMES,
        "parts": layer_parts(config, "linear_attention", delta_net),
    }


def _mixture(shape: ModelShape, config: Config, dense: Sequence[int] = ()) -> ModelShape:
    width, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    return replace(shape, experts=experts(config, width, shared, dense))


def _qwen3_next(shape: ModelShape, config: Config) -> Choices:
    dense = dense_between(config)
    return {
        **_delta_nets(config, by_head=True),
        "shape": _mixture(shape, config, dense) if config["num_experts"] else shape,
        "router": RouterSpec(normalize=bool(config["norm_topk_prob"])),
    }


def _qwen3_5(_: ModelShape, config: Config) -> Choices:
    choices = _delta_nets(config, by_head=False)
    return with_mrope(choices, config, (11, 11, 10), interleave=True)


def _qwen3_5_moe(shape: ModelShape, config: Config) -> Choices:
    return {**_qwen3_5(shape, config), "shape": _mixture(shape, config)}


def _without_mlp(config: Config) -> Config:
    """The config with an intermediate size: that of Qwen3.5-MoE has none, for every layer has experts."""
    return {"intermediate_size": config["moe_intermediate_size"], **config}


FAMILIES = (
    ModelFamily("qwen3_next", QK_NORM, _qwen3_next, with_states=True),
    ModelFamily("qwen3_5_text", QK_NORM, _qwen3_5, with_states=True),
    ModelFamily("qwen3_5_moe_text", QK_NORM, _qwen3_5_moe, with_states=True, prepare=_without_mlp),
    ModelFamily("qwen3_5", image_tokens=smart_resize),
    ModelFamily("qwen3_5_moe", image_tokens=smart_resize),
)
