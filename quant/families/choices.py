"""Choices that several families share: RoPE by layer, KV sharing, routing, experts, a constant state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...base.errors import BadInput
from .family import Choices, Choose
from .shape_rules import Config, ShapeRules
from .shapes import Experts, ModelShape
from .spec_parts import (
    LayerParts,
    Names,
    NotCovered,
    RopeSpec,
    RouterSpec,
    StateMixer,
    rope_options,
)

BIASED_ATTENTION = ShapeRules(qkv_bias="attention_bias", output_bias="attention_bias")
QK_NORM = ShapeRules(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True)
POST_NORMS = Names(
    input_norm="",
    post_attention_norm="post_attention_layernorm",
    mlp_norm="",
    post_mlp_norm="post_feedforward_layernorm",
)


def plain_ropes(_: ModelShape, config: Config) -> Choices:
    return ropes(config)


def same_rope(shape: ModelShape, config: Config, theta: float = 10000.0) -> Choices:
    part = {**config, **rope_options(config, theta)}.get("partial_rotary_factor")
    if part not in (None, 1):
        raise BadInput(
            f"config.json: partial_rotary_factor {part} rotates a part of each head in vLLM and all of it in "
            "transformers for this model type: remove it, or set it to 1.0"
        )
    return {"ropes": (RopeSpec.from_config(config, theta),) * shape.num_layers}


def rope_parts(config: Config) -> list[Any]:
    """Parameters of each layer's RoPE: one set for all, or one for each of the layer types."""
    parameters = config["rope_parameters"]
    parts = [parameters.get(kind) for kind in config.get("layer_types") or ()]
    if parts and all(isinstance(part, Mapping) for part in parts):
        return parts
    return [parameters] * config["num_hidden_layers"]


def rope_specs(config: Config) -> tuple[RopeSpec, ...]:
    """RoPE of each layer of a completed config."""
    return tuple(
        RopeSpec.from_config({**config, "rope_parameters": part}) for part in rope_parts(config)
    )


def ropes(config: Config, has_rope: Sequence[bool] | None = None) -> Choices:
    """RoPE of each layer of a completed config. Layers without `has_rope` have none (NoPE). The partial
    rotary factor, which all layers share, sets the rotated width."""
    specs: Sequence[RopeSpec | None] = rope_specs(config)
    if has_rope is not None:
        specs = [spec if flag else None for spec, flag in zip(specs, has_rope, strict=True)]
    factors = {(part or {}).get("partial_rotary_factor") or 1.0 for part in rope_parts(config)}
    if len(factors) > 1:
        parts = " and ".join(map(str, sorted(factors)))
        raise BadInput(f"config.json: partial_rotary_factor {parts} in one model is not supported")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"ropes": tuple(specs), "rotary_width": int(head_dim * factors.pop())}


def with_mrope(choose: Choose, *default: int, interleave: bool = False) -> Choose:
    """`choose`, whose RoPE becomes M-RoPE; `default` are the sections of the model type."""

    def choose_mrope(shape: ModelShape, config: Config) -> Choices:
        choices = choose(shape, config)
        sections = tuple(config["rope_parameters"].get("mrope_section") or default)
        changes: Any = {"sections": sections, "sections_interleave": interleave}
        return {**choices, "ropes": tuple(replace(rope, **changes) for rope in choices["ropes"])}

    return choose_mrope


def dense_between(config: Config) -> list[int]:
    """Layers with an MLP, by the step between layers with experts and the list of exceptions (Qwen)."""
    step, only = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return [i for i in range(config["num_hidden_layers"]) if i in only or (i + 1) % step]


def is_sliding(config: Config) -> list[bool]:
    return [kind == "sliding_attention" for kind in config["layer_types"]]


def kv_source(config: Config, index: int) -> int | None:
    """Layer whose keys and values a layer attends to, the last of its kind that does not share; or None."""
    kinds = config["layer_types"]
    first_shared = len(kinds) - (config["num_kv_shared_layers"] or 0)
    if index < first_shared:
        return None
    return first_shared - 1 - kinds[:first_shared][::-1].index(kinds[index])


def experts(
    config: Config, width: int, shared_width: int = 0, dense_layers: Sequence[int] = ()
) -> Experts:
    """The mixture of a completed config: experts of `width`, shared experts of `shared_width` together."""

    def number(*names: str) -> Any:
        """A number that the config may repeat for each layer (Hunyuan)."""
        value: Any = next((config[name] for name in names if config.get(name) is not None), None)
        repeated = isinstance(value, list) and value and all(item == value[0] for item in value)
        return value[0] if repeated else value

    count = number("num_local_experts", "num_experts", "n_routed_experts")
    per_token = number("num_experts_per_tok")
    if not isinstance(count, int) or not isinstance(per_token, int) or not 0 < per_token <= count:
        raise NotCovered(f"config.json: {per_token} of {count} experts per token are not supported")
    return Experts(count, per_token, width, shared_width, tuple(dense_layers))


def deepseek_router(config: Config) -> RouterSpec:
    """Routing of DeepSeek-V3: sigmoid scores, selected with a correction from the best groups."""
    return RouterSpec(
        scoring="sigmoid",
        normalize=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        num_groups=config["n_group"],
        topk_groups=config["topk_group"],
        group_top_k=2,
        correction=True,
    )


def first_dense(config: Config) -> range:
    return range(min(config["first_k_dense_replace"], config["num_hidden_layers"]))


def layer_parts(config: Config, kind: str, mixer: StateMixer) -> tuple[LayerParts, ...]:
    """Parts of each layer: a state in those of a `kind`, else attention. NotCovered: a layer is neither."""
    kinds = config["layer_types"]
    if unknown := sorted({*kinds} - {kind, "full_attention"}):
        raise NotCovered(f"config.json: layer_types holds {unknown[0]!r}, which is not supported")
    return tuple(LayerParts(mixer if name == kind else None) for name in kinds)


def check_silu(config: Config, key: str) -> None:
    if config[key] != "silu":
        raise NotCovered(f"config.json: {key} {config[key]!r} after a convolution is not supported")
