"""A model family of the native decoder, and what several of them share: RoPE by layer, routing, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...planner.model.families import Family
from ...planner.model.shapes import Experts, ModelShape
from ..spec.rope import RopeSpec
from ..spec.spec import NotCovered, RouterSpec

Config = Mapping[str, Any]
Choices = dict[str, Any]

BIASED_ATTENTION = Family(qkv_bias="attention_bias", output_bias="attention_bias")
QK_NORM = Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True)


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A model type of the native decoder.

    Attributes:
        choices: fields of `ModelSpec` that its shape does not tell, from shape and config.
        tensors: rules of its shape; None: the planner's table has them. With rules of its own the config is
            completed by transformers' config class, so that no default is listed here.
        with_states: layers may mix tokens with a constant state. Its shape is that of a model with attention
            in their place.
        prepare: of a completed config, what `choices` and the shape read.
    """

    choices: Callable[[ModelShape, Config], Choices]
    tensors: Family | None = None
    with_states: bool = False
    prepare: Callable[[Config], Config] = dict

    def shape(self, model_type: str, tensors: Family, config: Config) -> ModelShape:
        """The shape of a completed config by these rules."""
        if self.with_states:
            kinds = ["full_attention"] * len(config["layer_types"])
            config = {**config, "layer_types": kinds, "num_hidden_layers": len(kinds)}
        return ModelShape.from_completed(model_type, tensors, config)


def ropes(config: Config, has_rope: Sequence[bool] | None = None) -> Choices:
    """RoPE of each layer of a completed config: one for all, or one for each of its layer types.

    Layers without `has_rope` have none (NoPE). The partial rotary factor sets the rotated width.
    """
    parameters, layers = config["rope_parameters"], config["num_hidden_layers"]
    kinds = config.get("layer_types") or ()
    by_kind = {kind: parameters.get(kind) for kind in set(kinds)}
    if by_kind and all(isinstance(part, Mapping) for part in by_kind.values()):
        specs = [
            RopeSpec.from_config({**config, "rope_parameters": by_kind[kind]}) for kind in kinds
        ]
        part = next(iter(by_kind.values()))
    else:
        specs, part = [RopeSpec.from_config(config)] * layers, parameters
    if has_rope is not None:
        specs = [spec if flag else None for spec, flag in zip(specs, has_rope, strict=True)]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor = (part or {}).get("partial_rotary_factor") or 1.0
    return {"ropes": tuple(specs), "rotary_width": int(head_dim * factor)}


def with_mrope(
    choices: Choices, config: Config, sections: Sequence[int], *, interleave: bool = False
) -> Choices:
    """`ropes` as M-RoPE; `sections` are the default of the model type."""
    given = tuple(config["rope_parameters"].get("mrope_section") or sections)
    mrope = [
        replace(rope, sections=given, sections_interleave=interleave) for rope in choices["ropes"]
    ]
    return {**choices, "ropes": tuple(mrope)}


def dense_between(config: Config) -> list[int]:
    """Layers with an MLP, by the step between layers with experts and the list of exceptions (Qwen)."""
    step, only = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return [i for i in range(config["num_hidden_layers"]) if i in only or (i + 1) % step]


def is_sliding(config: Config) -> list[bool]:
    """Which layers have sliding-window attention."""
    return [kind == "sliding_attention" for kind in config["layer_types"]]


def kv_source(config: Config, index: int) -> int | None:
    """The layer whose keys and values a layer attends to: the last of its kind before those that share; None:
    its own (Gemma 3n and 4)."""
    kinds = config["layer_types"]
    first_shared = len(kinds) - (config["num_kv_shared_layers"] or 0)
    if index < first_shared:
        return None
    return first_shared - 1 - kinds[:first_shared][::-1].index(kinds[index])


def experts(
    config: Config, width: int, shared_width: int = 0, dense_layers: Sequence[int] = ()
) -> Experts:
    """The mixture of a completed config: experts of `width`, shared experts of `shared_width` together."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = _of_all_layers(
        next((config[name] for name in names if config.get(name) is not None), None)
    )
    per_token = _of_all_layers(config.get("num_experts_per_tok"))
    if not isinstance(count, int) or not isinstance(per_token, int) or not 0 < per_token <= count:
        raise NotCovered(f"config.json: {per_token} of {count} experts per token are not supported")
    return Experts(count, per_token, width, shared_width, tuple(dense_layers))


def _of_all_layers(value: Any) -> Any:
    """A number that the config may repeat for each layer (Hunyuan)."""
    repeated = isinstance(value, list) and value and all(item == value[0] for item in value)
    return value[0] if repeated else value


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
