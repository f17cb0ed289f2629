"""Gemma 4: layers of different sizes, shared keys and values, per-layer embeddings, an MLP beside experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...planner.model.shapes import ModelShape
from ..spec.rope import RopeSpec
from ..spec.spec import LayerSizes
from .dense_families import GEMMA_NORMS
from .family import QK_NORM, Choices, Config, DecoderFamily, experts, kv_source

_MIXTURE: dict[str, Any] = {
    "router": "router.proj",
    "router_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "experts": "experts",
    "fused_experts": ("gate_up_proj", "down_proj"),
    "fused_transposed": True,
}


def _gemma4(shape: ModelShape, config: Config) -> Choices:
    sizes = _gemma4_layers(shape, config)
    kinds = {
        kind: RopeSpec.from_config({**config, "rope_parameters": part})
        for kind, part in config["rope_parameters"].items()
    }
    pairs = zip(config["layer_types"], sizes, strict=True)
    width = config["hidden_size_per_layer_input"] or 0
    mixture, names = None, replace(GEMMA_NORMS, layer_scale="layer_scalar")
    if config["enable_moe_block"]:
        config = {**config, "num_experts_per_tok": config["top_k_experts"]}
        mixture = experts(config, config["moe_intermediate_size"])
        names = replace(names, mlp_norm="", **_MIXTURE)
    return {
        "shape": replace(shape, experts=mixture),
        "mlp_beside_experts": mixture is not None,
        "ropes": tuple(replace(kinds[kind], width=layer.head_dim) for kind, layer in pairs),
        "names": names,
        "activation": config["hidden_activation"],
        "attention_scale": 1.0,
        "bidirectional": _bidirectional(config),
        "embedding_scale": math.sqrt(shape.hidden_size),
        "logit_softcap": config["final_logit_softcapping"],
        "layers": sizes,
        "value_norm": True,
        "per_layer_width": width,
        "placeholder_pad": config["pad_token_id"] or 0,
        "placeholders": config["placeholder_token_ids"],
        "per_layer_vocab": config["vocab_size_per_layer_input"] if width else 0,
    }


def _bidirectional(config: Config) -> tuple[bool, ...]:
    """The layers in which the tokens of an image attend to all of it: those with a sliding window, if any."""
    in_images = config.get("use_bidirectional_attention") == "vision"
    return tuple(in_images and kind != "full_attention" for kind in config["layer_types"])


def _gemma4_layers(shape: ModelShape, config: Config) -> tuple[LayerSizes, ...]:
    """Sizes by layer: full-attention layers have other heads; the last ones share the keys and values of the
    last layer of their kind before them."""
    kinds, changes = config["layer_types"], config.get("per_layer_config") or {}
    layers = []
    for index, kind in enumerate(kinds):
        own = changes.get(str(index), changes.get(index, {}))
        source = kv_source(config, index)
        wide = source is not None and config["use_double_wide_mlp"]
        layers.append(
            LayerSizes(
                own.get("num_key_value_heads", shape.num_kv_heads),
                own.get("head_dim", shape.head_dim),
                shape.intermediate_size * (2 if wide else 1),
                source,
                bool(config["attention_k_eq_v"]) and kind == "full_attention",
            )
        )
    return tuple(layers)


GEMMA4 = DecoderFamily(_gemma4, replace(QK_NORM, norms_per_layer=4))
