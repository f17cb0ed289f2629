"""ERNIE 4.5: interleaved RoPE, dense or with experts in a range of layers."""

from __future__ import annotations

from dataclasses import replace

from .choices import experts, ropes
from .family import Choices, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import Names, NotCovered, RouterSpec


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


FAMILIES = (
    ModelFamily(
        "ernie4_5",
        ShapeRules(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias"),
        lambda _, config: {**ropes(config), "rotary_interleaved": True},
    ),
    ModelFamily("ernie4_5_moe", ShapeRules(), _ernie_moe),
)
