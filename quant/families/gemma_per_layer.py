"""Gemma 3n and 4: per-layer embeddings, layers of different sizes that share keys and values.

Gemma 3n has alternating updates and sparse activations; Gemma 4 an MLP beside experts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import floor, sqrt
from typing import Any

from .choices import QK_NORM, experts, kv_source
from .family import Choices, ImageSettings, ImageTokens, ModelFamily
from .gemma import GEMMA_NORMS
from .shape_rules import Config
from .shapes import ModelShape
from .spec_parts import AltUpSpec, LayerSizes, RopeSpec

_FOUR_NORMS = replace(QK_NORM, norms_per_layer=4)


def _by_kind(config: Config) -> dict[str, RopeSpec]:
    """RoPE of each kind of layer."""
    return {
        kind: RopeSpec.from_config({**config, "rope_parameters": part})
        for kind, part in config["rope_parameters"].items()
    }


def _gemma3n(shape: ModelShape, config: Config) -> Choices:
    kinds = _by_kind(config)
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
    kinds = _by_kind(config)
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


def _within_budget(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """The largest size within a budget of patches, in multiples of the pooling kernel."""
    patch = settings.vision_size("patch_size", 16)
    kernel = settings.vision_size("pooling_kernel_size", 3)
    budget = settings.processor.get("max_soft_tokens") or settings.config.get(
        "vision_soft_tokens_per_image", 280
    )
    scale = sqrt(budget * (kernel * patch) ** 2 / (height * width))
    rows = floor(scale * height / (kernel * patch))
    columns = floor(scale * width / (kernel * patch))
    if not rows:
        rows, columns = 1, min(width // height, budget)
    elif not columns:
        rows, columns = min(height // width, budget), 1
    return ImageTokens(
        rows * columns, rows * columns * kernel**2, 1, f"{columns} x {rows} within {budget} tokens"
    )


FAMILIES = (
    ModelFamily("gemma3n_text", _FOUR_NORMS, _gemma3n, prepare=_one_width),
    ModelFamily("gemma4_text", _FOUR_NORMS, _gemma4),
    ModelFamily("gemma4", image_tokens=_within_budget),
)
