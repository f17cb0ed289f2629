"""Gemma 3n: alternating updates, per-layer embeddings, shared keys and values, sparse activations."""

from __future__ import annotations

import math
from dataclasses import replace

from ...planner.model.shapes import ModelShape
from ..spec.rope import RopeSpec
from ..spec.spec import AltUpSpec, LayerSizes
from .dense_families import GEMMA_NORMS
from .family import QK_NORM, Choices, Config, DecoderFamily, kv_source


def _gemma3n(shape: ModelShape, config: Config) -> Choices:
    kinds = {
        kind: RopeSpec.from_config({**config, "rope_parameters": part})
        for kind, part in config["rope_parameters"].items()
    }
    inner, sparsity = config["intermediate_sizes"], config["activation_sparsity_pattern"]
    return {
        "ropes": tuple(kinds[kind] for kind in config["layer_types"]),
        "names": GEMMA_NORMS,
        "activation": config["hidden_activation"],
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(shape.hidden_size),
        "logit_softcap": config["final_logit_softcapping"],
        "layers": tuple(
            LayerSizes(
                shape.num_kv_heads,
                shape.head_dim,
                inner[index],
                kv_source(config, index),
                sparsity=float(sparsity[index]),
            )
            for index in range(shape.num_layers)
        ),
        "value_norm": True,
        "per_layer_width": config["hidden_size_per_layer_input"],
        "per_layer_vocab": config["vocab_size_per_layer_input"],
        "altup": AltUpSpec(
            config["altup_num_inputs"],
            config["altup_active_idx"],
            bool(config["altup_correct_scale"]),
            config["laurel_rank"],
        ),
    }


def _one_width(config: Config) -> Config:
    """The config with one intermediate size for all layers, and theirs beside it."""
    sizes = list(config["intermediate_size"])
    return {**config, "intermediate_size": max(sizes), "intermediate_sizes": sizes}


GEMMA3N = DecoderFamily(_gemma3n, replace(QK_NORM, norms_per_layer=4), prepare=_one_width)
