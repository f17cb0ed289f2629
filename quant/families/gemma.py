"""Gemma: norms that add one, scaled embeddings, soft caps, two kinds of RoPE.

Gemma 3n and 4 have per-layer embeddings and layers of different sizes that share keys and values; Gemma 3n
alternating updates and sparse activations, Gemma 4 an MLP beside experts.
"""

from __future__ import annotations

from dataclasses import replace
from math import floor, sqrt
from typing import Any

from .choices import BIASED_ATTENTION, QK_NORM, experts, kv_source, rope_specs, ropes, same_rope
from .family import (
    GGUF_ATTENTION,
    GGUF_DENSE,
    GGUF_MLP,
    GGUF_NORMS,
    Choices,
    GgufRules,
    ImageSettings,
    ImageTokens,
    ModelFamily,
)
from .shape_rules import Config, full_every
from .shapes import ModelShape
from .spec_parts import AltUpSpec, LayerSizes, Names, NotCovered, RopeSpec

GEMMA_NORMS = Names(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "attention_bias": False,
    "sliding_window": 4096,
}
_GELU = ("gelu_pytorch_tanh",)


def _gemma(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        "activation": config.get("hidden_activation") or config["hidden_act"],
        "norm_offset": 1.0,
        "embedding_scale": sqrt(shape.hidden_size),
    }


def _sandwiched(shape: ModelShape, config: Config) -> Choices:
    return {
        "names": GEMMA_NORMS,
        "activation": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "norm_offset": 1.0,
        "embedding_scale": sqrt(shape.hidden_size),
    }


def _gemma2(shape: ModelShape, config: Config) -> Choices:
    return {
        **_sandwiched(shape, config),
        **same_rope(shape, config),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
    }


def _gemma3(shape: ModelShape, config: Config) -> Choices:
    if config.get("use_bidirectional_attention"):
        raise NotCovered("config.json: use_bidirectional_attention is not supported")
    both = config.get("rope_parameters") or {}
    if "full_attention" in both or "sliding_attention" in both:
        scaled = {**(both.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        full = {**config, "rope_scaling": scaled}
        sliding = {**config, "rope_scaling": None, "rope_parameters": both.get("sliding_attention")}
    else:
        full = config
        sliding = {"rope_theta": config.get("rope_local_base_freq")}
    kinds = (RopeSpec.from_config(full, 1e6), RopeSpec.from_config(sliding, 1e4))
    return {
        **_sandwiched(shape, config),
        "ropes": tuple(kinds[window is not None] for window in shape.windows),
        "bidirectional": (True,) * shape.num_layers,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def _pooled(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """The image is resized to a square and pooled to a number of tokens."""
    tokens = int(settings.config.get("mm_tokens_per_image", 256))
    side = settings.vision_size("image_size", 896) // settings.vision_size("patch_size", 14)
    return ImageTokens(tokens, side**2, 1, "mm_tokens_per_image")


_FOUR_NORMS = replace(QK_NORM, norms_per_layer=4)


def _gemma3n(shape: ModelShape, config: Config) -> Choices:
    inner, sparsity = config["intermediate_sizes"], config["activation_sparsity_pattern"]
    return {
        "ropes": rope_specs(config),
        "names": GEMMA_NORMS,
        "activation": config["hidden_activation"],
        "attention_scale": 1.0,
        "embedding_scale": sqrt(shape.hidden_size),
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
    pairs = zip(rope_specs(config), sizes, strict=True)
    # The tokens of an image attend to all of it in layers with a sliding window.
    in_images = config.get("use_bidirectional_attention") == "vision"
    width = config["hidden_size_per_layer_input"] or 0
    mixture, names = None, replace(GEMMA_NORMS, layer_scale="layer_scalar")
    if config["enable_moe_block"]:
        config = {**config, "num_experts_per_tok": config["top_k_experts"]}
        mixture = experts(config, config["moe_intermediate_size"])
        names = replace(names, mlp_norm="", **_MIXTURE)
    return {
        "shape": replace(shape, experts=mixture),
        "mlp_beside_experts": mixture is not None,
        "ropes": tuple(replace(rope, width=layer.head_dim) for rope, layer in pairs),
        "names": names,
        "activation": config["hidden_activation"],
        "attention_scale": 1.0,
        "bidirectional": tuple(
            in_images and kind != "full_attention" for kind in config["layer_types"]
        ),
        "embedding_scale": sqrt(shape.hidden_size),
        "logit_softcap": config["final_logit_softcapping"],
        "layers": sizes,
        "value_norm": True,
        "per_layer_width": width,
        "placeholder_pad": config["pad_token_id"] or 0,
        "placeholders": config["placeholder_token_ids"],
        "per_layer_vocab": config["vocab_size_per_layer_input"] if width else 0,
    }


def _gemma4_layers(shape: ModelShape, config: Config) -> tuple[LayerSizes, ...]:
    """Sizes by layer: full-attention layers have other heads; last ones share the last of their kind."""
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
    ModelFamily(
        "gemma",
        BIASED_ATTENTION,
        _gemma,
        gguf=GgufRules(
            "gemma",
            GGUF_DENSE,
            norm_offset=1.0,
            activations=("gelu", *_GELU),
            defaults={"head_dim": 256},
        ),
    ),
    ModelFamily(
        "gemma2",
        replace(
            BIASED_ATTENTION,
            defaults={
                **_DEFAULTS,
                "num_key_value_heads": 4,
                "max_position_embeddings": 8192,
                "vocab_size": 256000,
            },
            windows=full_every(2, "sliding_window", "sliding_window_pattern"),
            norms_per_layer=4,
        ),
        _gemma2,
        gguf=GgufRules(
            "gemma2",
            stems=(
                *(*GGUF_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
                *(*GGUF_ATTENTION, *GGUF_MLP),
            ),
            norm_offset=1.0,
            activations=_GELU,
            keys={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
                "sliding_window": "attention.sliding_window",
            },
            defaults={
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": 256,
            },
        ),
    ),
    ModelFamily(
        "gemma3_text",
        replace(
            BIASED_ATTENTION,
            defaults={
                **_DEFAULTS,
                "max_position_embeddings": 131072,
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
            },
            windows=full_every(6, "sliding_window", "sliding_window_pattern"),
            norms_per_layer=4,
            qk_norm=True,
        ),
        _gemma3,
    ),
    ModelFamily("gemma3", image_tokens=_pooled, ties_wrapped=True),
    ModelFamily(
        "gemma3n_text",
        _FOUR_NORMS,
        _gemma3n,
        prepare=lambda config: {
            **config,
            "intermediate_size": max(config["intermediate_size"]),
            "intermediate_sizes": list(config["intermediate_size"]),
        },
    ),
    ModelFamily("gemma4_text", _FOUR_NORMS, _gemma4),
    ModelFamily("gemma4", image_tokens=_within_budget),
)
