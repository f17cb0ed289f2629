"""Rules by which a `config.json` becomes the shape of a decoder: attention windows, biases, norms, experts.

Files on the hub omit whatever equals the default of their config class, so a missing key means different
things by class. Model types without defaults here are completed by transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.errors import BadInput

Config = Mapping[str, Any]
Windows = tuple[int | None, ...]

_WINDOW_KEYS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}


def full_attention(config: Config) -> Windows:
    return (None,) * config["num_hidden_layers"]


def sliding_everywhere(config: Config) -> Windows:
    return (config.get("sliding_window"),) * config["num_hidden_layers"]


def full_every(default: int, window_key: str, *interval_keys: str) -> Callable[[Config], Windows]:
    """Full attention in layer i if (i + 1) is a multiple of the interval, else sliding-window attention."""

    def windows(config: Config) -> Windows:
        intervals = [config[key] for key in interval_keys if config.get(key)]
        interval = intervals[0] if intervals else default
        return tuple(
            None if (i + 1) % interval == 0 else config[window_key]
            for i in range(config["num_hidden_layers"])
        )

    return windows


def all_sparse(config: Config) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """Architecture of a model type, as far as it affects parameters, KV cache or FLOP.

    `qkv_bias`, `output_bias` and `mlp_bias` are a config key or a constant.

    Attributes:
        defaults: defaults of transformers' config class, so that the shape needs no transformers; None: a
            config is completed by that class.
        width_key: the key of the MLP's width where `intermediate_size` is ignored, even if the file has it.
        num_kv_heads: KV heads that the config does not give by its usual keys; None: it does.
        shared_experts: the width of the shared expert, in routed ones: a config key or a number.
        learned_positions: True if each position has a learned vector.
    """

    defaults: Mapping[str, Any] | None = None
    windows: Callable[[Config], Windows] = full_attention
    dense_layers: Callable[[Config], Sequence[int]] = all_sparse
    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    expert_bias: bool = False
    norms_per_layer: int | Callable[[Config], int] = 2
    layer_norm: bool = False  # weight and bias; RMSNorm has only a weight
    qk_norm: bool = False
    gated_mlp: bool = True
    sinks: bool = False
    width_key: str = ""
    num_kv_heads: Callable[[Config], int | None] | None = None
    shared_experts: str | int = "n_shared_experts"
    learned_positions: bool = False

    def has_default(self, *keys: str) -> bool:
        return any(key in (self.defaults or ()) for key in keys)


def has_chunks(config: Config) -> bool:
    """True if windowed layers use chunked (non-overlapping) attention instead of sliding windows."""
    kinds = config.get("layer_types") or ()
    return "chunked_attention" in kinds or (not kinds and "attention_chunk_size" in config)


def layer_windows(config: Config, rules: ShapeRules) -> Windows:
    """Attention window of each layer in tokens; None: full. BadInput: an unsupported type, or wrong count."""
    kinds = config.get("layer_types")
    if not kinds:
        return rules.windows(config)
    if len(kinds) != config["num_hidden_layers"]:
        raise BadInput(
            f"layer_types lists {len(kinds)} layers, num_hidden_layers says "
            f"{config['num_hidden_layers']}"
        )
    for kind in kinds:
        if kind not in _WINDOW_KEYS:
            raise BadInput(
                f"layer_types holds {kind!r}, which is not supported "
                f"(supported: {', '.join(_WINDOW_KEYS)})"
            )
        key = _WINDOW_KEYS[kind]
        if key is not None and config.get(key) is None:
            raise BadInput(f"layer_types holds {kind!r}, but the config has no {key}")
    keys = (_WINDOW_KEYS[kind] for kind in kinds)
    return tuple(None if key is None else config[key] for key in keys)
