"""gpt-oss: attention sinks that are learned, clamped SwiGLU experts, YaRN."""

from __future__ import annotations

from dataclasses import replace

from .choices import BIASED_ATTENTION, same_rope
from .family import Choices, ModelFamily
from .shape_rules import Config, full_every
from .shapes import ModelShape
from .spec_parts import CLAMPED_SWIGLU, Names, NotCovered, RouterSpec


def _gpt_oss(shape: ModelShape, config: Config) -> Choices:
    if "rope_parameters" not in config and "rope_scaling" not in config:
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
