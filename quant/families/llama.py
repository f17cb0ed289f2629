"""Llama, and what is Llama with biases or layers without RoPE: Seed-OSS, SmolLM 3; Llama 4; Mistral and kin.

Mixtral, Ministral, and Pixtral's tower before Mistral 3.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from .choices import plain_ropes, ropes, same_rope
from .family import (
    GGUF_ATTENTION,
    GGUF_DENSE,
    GGUF_EXPERTS,
    GGUF_NORMS,
    Choices,
    GgufRules,
    ImageSettings,
    ImageTokens,
    ModelFamily,
)
from .shape_rules import Config, ShapeRules, Windows, full_every, sliding_everywhere
from .shapes import ModelShape
from .spec_parts import Names, NotCovered, RopeSpec, RouterSpec, Temperature

_BIASED = ShapeRules(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")


def _chunked(config: Config) -> Windows:
    """Chunked attention in layers with RoPE; full attention in those without (NoPE)."""
    if rotary := config.get("no_rope_layers"):
        return tuple(config["attention_chunk_size"] if flag else None for flag in rotary)
    return full_every(4, "attention_chunk_size", "no_rope_layer_interval")(config)


def _dense_layers(config: Config) -> tuple[int, ...]:
    step, layers = config["interleave_moe_layer_step"], range(config["num_hidden_layers"])
    sparse = config.get("moe_layers") or range(step - 1, config["num_hidden_layers"], step)
    return tuple(i for i in layers if i not in sparse)


def _llama4(shape: ModelShape, config: Config) -> Choices:
    block = "feed_forward"
    with_rope = config.get("no_rope_layers") or [window is not None for window in shape.windows]
    rope = RopeSpec.from_config(config, 500000.0)
    return {
        "names": Names(
            gate_up=(f"{block}.gate_proj", f"{block}.up_proj"),
            down=f"{block}.down_proj",
            router=f"{block}.router",
            experts=f"{block}.experts",
            shared_expert=f"{block}.shared_expert",
            fused_experts=("gate_up_proj", "down_proj"),
        ),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "ropes": tuple(rope if has_rope else None for has_rope in with_rope),
        "rotary_interleaved": True,
        "qk_norm_after_rotation": bool(config.get("use_qk_norm", True)),
        "temperature": Temperature(config.get("floor_scale", 8192), config.get("attn_scale", 0.1))
        if config.get("attn_temperature_tuning", True)
        else None,
        "router": RouterSpec(scoring="sigmoid", normalize=False, on_inputs=True),
    }


_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

_BLOCK = "block_sparse_moe"


def _mixtral(shape: ModelShape, config: Config) -> Choices:
    return {
        **same_rope(shape, config, 1e6),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "names": Names(
            router=f"{_BLOCK}.gate", experts=f"{_BLOCK}.experts", expert=("w1", "w3", "w2")
        ),
    }


def _ministral3(_: ModelShape, config: Config) -> Choices:
    rope = config["rope_parameters"]
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta:
        return ropes(config)
    if not original:
        raise NotCovered("config.json: llama_4_scaling_beta needs original_max_position_embeddings")
    temperature = Temperature(original, beta, first=0, everywhere=True)
    return {**ropes(config), "temperature": temperature}


def _pixtral(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """Patches of the image shrunk to the longest edge, with a break after each row."""
    longest = settings.side("size", settings.vision_size("image_size", 1540))
    patch = settings.vision_size("patch_size", 14)
    merge = int(settings.config.get("spatial_merge_size", 1))
    ratio = max(height / longest, width / longest, 1)
    columns, rows = (ceil(int(side / ratio) / (patch * merge)) for side in (width, height))
    patches = rows * columns * merge**2
    return ImageTokens(rows * (columns + 1), patches, 1, f"{rows} x ({columns} + 1)")


FAMILIES = (
    ModelFamily(
        "llama",
        replace(
            _BIASED,
            defaults={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
        ),
        same_rope,
        gguf=GgufRules("llama", GGUF_DENSE, permuted=True),
        plain_tokenizer=True,
    ),
    ModelFamily(
        "seed_oss",
        replace(_BIASED, output_bias="attention_out_bias"),
        plain_ropes,
        gguf=GgufRules(
            "seed_oss", GGUF_DENSE, defaults={"head_dim": 128, "num_key_value_heads": 8}
        ),
    ),
    ModelFamily(
        "smollm3",
        _BIASED,
        lambda _, config: ropes(config, [bool(flag) for flag in config["no_rope_layers"]]),
        plain_tokenizer=True,
    ),
    ModelFamily(
        "llama4_text",
        ShapeRules(
            {
                "max_position_embeddings": 131072,
                "head_dim": 128,
                "num_key_value_heads": 8,
                "intermediate_size_mlp": 16384,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "attention_chunk_size": 8192,
                "interleave_moe_layer_step": 1,
                "attention_bias": False,
            },
            _chunked,
            _dense_layers,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            shared_experts=1,
        ),
        _llama4,
        splits_experts=True,
    ),
    ModelFamily("llama4", ties_wrapped=False, splits_experts=True),
    ModelFamily(
        "mistral",
        ShapeRules({**_DEFAULTS, "sliding_window": 4096}, sliding_everywhere),
        same_rope,
        gguf=GgufRules("llama", GGUF_DENSE, permuted=True, slides=True),
    ),
    ModelFamily(
        "mixtral",
        ShapeRules(
            {**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}, sliding_everywhere
        ),
        _mixtral,
        gguf=GgufRules(
            "llama",
            stems=(
                *(*GGUF_NORMS, *GGUF_ATTENTION, f"{_BLOCK}.gate"),
                *(f"{_BLOCK}.experts.w{number}" for number in (1, 2, 3)),
            ),
            permuted=True,
            keys=GGUF_EXPERTS | {"num_local_experts": "expert_count"},
            defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        ),
    ),
    ModelFamily("ministral", ShapeRules(), plain_ropes),
    ModelFamily("ministral3", ShapeRules(windows=sliding_everywhere), _ministral3),
    ModelFamily("mistral3", image_tokens=_pixtral, ties_wrapped=True),
)
