"""Qwen 2, 3, 3-Next and 3.5: dense, with experts, behind a vision tower (M-RoPE), with gated delta nets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil, floor, sqrt

from ...base.errors import BadInput
from .choices import (
    QK_NORM,
    check_silu,
    dense_between,
    experts,
    layer_parts,
    plain_ropes,
    ropes,
    same_rope,
    with_mrope,
)
from .family import (
    GGUF_ATTENTION,
    GGUF_DENSE,
    GGUF_EXPERTS,
    GGUF_MLP,
    GGUF_NORMS,
    GGUF_QK_NORMS,
    Choices,
    GgufRules,
    ImageSettings,
    ImageTokens,
    ModelFamily,
)
from .shape_rules import Config, ShapeRules, Windows
from .shapes import ModelShape
from .spec_parts import DeltaNetSpec, Names, RouterSpec

_WINDOW = {"use_sliding_window": False, "max_window_layers": 28}


def _sliding_if_used(config: Config) -> Windows:
    """`sliding_window` counts only with `use_sliding_window`, and only past `max_window_layers`."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(config["num_hidden_layers"]))


def _qwen3_moe(shape: ModelShape, config: Config) -> Choices:
    router = RouterSpec(normalize=bool(config.get("norm_topk_prob", False)))
    return {**same_rope(shape, config), "router": router}


def _mixture(shape: ModelShape, config: Config, dense: Sequence[int] = ()) -> ModelShape:
    width, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    return replace(shape, experts=experts(config, width, shared, dense))


def _qwen2_moe(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        "shape": _mixture(shape, config, dense_between(config)),
        "names": Names(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
        "router": RouterSpec(normalize=bool(config["norm_topk_prob"])),
    }


_qwen2_vl = with_mrope(plain_ropes, 16, 24, 24)
_qwen3_vl = with_mrope(plain_ropes, 24, 20, 20, interleave=True)


def _qwen3_vl_moe(shape: ModelShape, config: Config) -> Choices:
    mixture = experts(config, config["moe_intermediate_size"], dense_layers=dense_between(config))
    return {
        **_qwen3_vl(shape, config),
        "shape": replace(shape, experts=mixture),
        "names": Names(fused_experts=("gate_up_proj", "down_proj")),
    }


def smart_resize(settings: ImageSettings, width: int, height: int) -> ImageTokens:
    """Tokens of an image resized to multiples of patch x merge, within a range of pixels (`smart_resize`)."""
    patch = settings.vision_size("patch_size", 14)
    merge = settings.vision_size("spatial_merge_size", 2)
    size = settings.processor.get("size") or {}
    factor = patch * merge
    least = settings.processor.get("min_pixels") or size.get("shortest_edge") or 4 * factor**2
    most = settings.processor.get("max_pixels") or size.get("longest_edge") or 16384 * factor**2
    if max(height, width) > 200 * min(height, width):
        raise BadInput(f"an image of {width}x{height}: this model takes aspect ratios up to 200")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > most:
        scale = sqrt(height * width / most)
        high = max(factor, floor(height / scale / factor) * factor)
        wide = max(factor, floor(width / scale / factor) * factor)
    elif high * wide < least:
        scale = sqrt(least / (height * width))
        high, wide = ceil(height * scale / factor) * factor, ceil(width * scale / factor) * factor
    patches = (high // patch) * (wide // patch)
    return ImageTokens(
        patches // merge**2, patches, 1, f"{wide}/{factor} x {high}/{factor} after resizing"
    )


_wrapper = partial(ModelFamily, image_tokens=smart_resize)

_NEXT_NAMES = Names(
    state_mixer="linear_attn",
    shared_expert="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    fused_experts=("gate_up_proj", "down_proj"),
    fused_transposed=True,
    mtp=("mtp.",),
)


def _delta_nets(_: ModelShape, config: Config, by_head: bool = False) -> Choices:
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
        "names": _NEXT_NAMES,
        "parts": layer_parts(config, "linear_attention", delta_net),
    }


def _qwen3_next(shape: ModelShape, config: Config) -> Choices:
    dense = dense_between(config)
    return {
        **_delta_nets(shape, config, by_head=True),
        "shape": _mixture(shape, config, dense) if config["num_experts"] else shape,
        "router": RouterSpec(normalize=bool(config["norm_topk_prob"])),
    }


_qwen3_5 = with_mrope(_delta_nets, 11, 11, 10, interleave=True)

FAMILIES = (
    ModelFamily(
        "qwen2",
        ShapeRules({"max_position_embeddings": 32768, **_WINDOW}, _sliding_if_used, qkv_bias=True),
        same_rope,
        gguf=GgufRules("qwen2", GGUF_DENSE),
    ),
    ModelFamily("qwen2_moe", ShapeRules(qkv_bias="qkv_bias"), _qwen2_moe),
    ModelFamily(
        "qwen3",
        replace(
            QK_NORM,
            defaults={
                "max_position_embeddings": 32768,
                "head_dim": 128,
                "attention_bias": False,
                **_WINDOW,
            },
            windows=_sliding_if_used,
        ),
        same_rope,
        gguf=GgufRules("qwen3", (*GGUF_DENSE, *GGUF_QK_NORMS), defaults={"head_dim": 128}),
        plain_tokenizer=True,
    ),
    ModelFamily(
        "qwen3_moe",
        replace(
            QK_NORM,
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 768,
                "num_local_experts": 128,
                "num_experts_per_tok": 8,
                "decoder_sparse_step": 1,
                "norm_topk_prob": False,
                "attention_bias": False,
                **_WINDOW,
            },
            windows=lambda config: _sliding_if_used({**config, "max_window_layers": 0}),
            dense_layers=dense_between,
        ),
        _qwen3_moe,
        gguf=GgufRules(
            "qwen3moe",
            stems=(
                *(*GGUF_NORMS, *GGUF_ATTENTION, *GGUF_QK_NORMS, "mlp.gate"),
                *(name.replace("mlp.", "mlp.experts.") for name in GGUF_MLP),
            ),
            keys=GGUF_EXPERTS | {"num_experts": "expert_count"},
            constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
    ),
    ModelFamily("qwen2_vl_text", ShapeRules(qkv_bias=True), _qwen2_vl),
    ModelFamily("qwen2_5_vl_text", ShapeRules(qkv_bias=True), _qwen2_vl),
    ModelFamily("qwen3_vl_text", QK_NORM, _qwen3_vl),
    ModelFamily("qwen3_vl_moe_text", QK_NORM, _qwen3_vl_moe),
    *(_wrapper("qwen2_vl"), _wrapper("qwen2_5_vl"), _wrapper("qwen3_vl")),
    _wrapper("qwen3_vl_moe", splits_experts=True),
    ModelFamily("qwen3_next", QK_NORM, _qwen3_next, with_states=True),
    ModelFamily("qwen3_5_text", QK_NORM, _qwen3_5, with_states=True),
    ModelFamily(
        "qwen3_5_moe_text",
        QK_NORM,
        lambda shape, config: {**_qwen3_5(shape, config), "shape": _mixture(shape, config)},
        with_states=True,
        # Every layer has experts, and the config no intermediate size.
        prepare=lambda config: {"intermediate_size": config["moe_intermediate_size"], **config},
    ),
    ModelFamily("qwen3_5", image_tokens=smart_resize),
    ModelFamily("qwen3_5_moe", image_tokens=smart_resize),
)
