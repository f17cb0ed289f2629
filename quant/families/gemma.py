"""Gemma 1 to 3: norms that add one, scaled embeddings, soft caps, two kinds of RoPE."""

from __future__ import annotations

import math
from dataclasses import replace

from .choices import BIASED_ATTENTION, ropes, same_rope
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
from .spec_parts import Names, NotCovered, RopeSpec

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
        "embedding_scale": math.sqrt(shape.hidden_size),
    }


GEMMA = ModelFamily(
    "gemma",
    BIASED_ATTENTION,
    _gemma,
    gguf=GgufRules(
        "gemma", GGUF_DENSE, norm_offset=1.0, activations=("gelu", *_GELU), head_dim=256
    ),
)


def _sandwiched(shape: ModelShape, config: Config) -> Choices:
    """Norms before and after attention and MLP, for Gemma 2 and 3."""
    return {
        "names": GEMMA_NORMS,
        "activation": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(shape.hidden_size),
    }


def _gemma2(shape: ModelShape, config: Config) -> Choices:
    return {
        **_sandwiched(shape, config),
        **same_rope(shape, config),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
    }


GEMMA2 = ModelFamily(
    "gemma2",
    replace(
        BIASED_ATTENTION,
        defaults={**_DEFAULTS, "max_position_embeddings": 8192, "vocab_size": 256000},
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
        head_dim=256,
    ),
)


def _gemma3(shape: ModelShape, config: Config) -> Choices:
    if config.get("use_bidirectional_attention"):
        raise NotCovered("config.json: use_bidirectional_attention is not supported")
    return {
        **_sandwiched(shape, config),
        "ropes": _gemma3_ropes(shape, config),
        "bidirectional": (True,) * shape.num_layers,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def _gemma3_ropes(shape: ModelShape, config: Config) -> tuple[RopeSpec, ...]:
    """One RoPE for full-attention layers and one for sliding-window layers, in either config form."""
    both = config.get("rope_parameters") or {}
    if "full_attention" in both or "sliding_attention" in both:
        full = {**config, "rope_parameters": both.get("full_attention")}
        sliding = {**config, "rope_parameters": both.get("sliding_attention")}
    else:
        full = config
        sliding = {"rope_theta": config.get("rope_local_base_freq")}
    kinds = (RopeSpec.from_config(full, 1e6), RopeSpec.from_config(sliding, 1e4))
    return tuple(kinds[window is not None] for window in shape.windows)


GEMMA3 = ModelFamily(
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
)


def _pooled(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """The image is resized to a square and pooled to a number of tokens."""
    tokens = int(settings.config.get("mm_tokens_per_image", 256))
    patches = (
        settings.vision_size("image_size", 896) // settings.vision_size("patch_size", 14)
    ) ** 2
    return ImageTokens(tokens, patches, 1, "mm_tokens_per_image")


GEMMA3_IMAGES = ModelFamily("gemma3", image_tokens=_pooled, ties_wrapped=True)

FAMILIES = (GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES)
