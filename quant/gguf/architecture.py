"""Between a Hugging Face checkpoint and GGUF: metadata keys, tensor names, and the rows of q and k.

Names are those of the `gguf` package's tensor map. Where a file is read, the Hugging Face name is the one
that the family of its architecture has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...base.errors import BadInput
from ...base.extras import import_extra
from ..families.family import GgufRules
from ..families.registry import all_families, model_family, type_of
from ..families.spec_parts import rope_options
from ..model.checkpoint import EXPERT

if TYPE_CHECKING:
    import torch

ROPE_FACTORS = "rope_freqs.weight"
# Fields that transformers writes under another name than older configs have.
_ALIASES = {"num_experts": "num_local_experts"}
SHAPE_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}


def gguf_families() -> dict[str, GgufRules]:
    return {family.name: family.gguf for family in all_families() if family.gguf is not None}


def family_rules(config: Mapping[str, Any]) -> GgufRules:
    """The rules of the config's model type; BadInput for a type that GGUF does not have here."""
    family = model_family(type_of(config))
    if family is None or family.gguf is None or family.name != type_of(config):
        raise BadInput(
            f"model type {type_of(config)!r} cannot be written as GGUF: supported are "
            f"{', '.join(gguf_families())}"
        )
    return family.gguf


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with the values that its model type has for what it leaves out."""
    family = model_family(type_of(config))
    shape = (family and family.rules and family.rules.defaults) or {}
    fields = {**shape, **family_rules(config).defaults, **config}
    for name, alias in _ALIASES.items():
        if name not in config and alias in fields:
            fields[name] = fields[alias]
    return fields


def writable_rules(config: Mapping[str, Any]) -> GgufRules:
    """The rules of a `config.json`; BadInput for a model type or a feature that cannot be written."""
    rules = family_rules(config)
    activation = config.get("hidden_act") or config.get("hidden_activation")
    if activation is not None and activation not in rules.activations:
        raise BadInput(f"hidden_act {activation!r} cannot be written as GGUF")
    config = completed(config)
    fields = {**config, **rope_of(config)}
    for name, value in {"is_causal": True, **rules.constants}.items():
        if (given := fields.get(name, value)) != value:
            raise BadInput(f"{name} {given!r} cannot be written as GGUF: only {value!r}")
    window = config.get("sliding_window")
    slides = rules.slides or config.get("use_sliding_window", False)
    if not slides or "sliding_window" in rules.keys:
        window = None
    if window is not None and window < config.get("max_position_embeddings", window):
        raise BadInput(f"a sliding window of {window} tokens cannot be written as GGUF")
    scale = config.get("query_pre_attn_scalar")
    if scale is not None and scale != (usual := query_scalar(config, rules)):
        raise BadInput(f"query_pre_attn_scalar {scale} cannot be written as GGUF: only {usual}")
    return rules


def query_scalar(config: Mapping[str, Any], rules: GgufRules) -> int:
    """Gemma's `query_pre_attn_scalar`, which no key holds, as llama.cpp has it (src/models/gemma2.cpp)."""
    if rules.architecture == "gemma2" and config["num_hidden_layers"] == 46:  # Gemma 2 27B
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return head_dim_of(config)


def head_dim_of(config: Mapping[str, Any]) -> int:
    default = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(completed(config).get("head_dim") or default)


def gguf_architecture(config: Mapping[str, Any]) -> str:
    return writable_rules(config).architecture


def permuted_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Linears whose rows GGUF permutes (interleaved RoPE), with their number of heads."""
    if not family_rules(config).permuted:
        return {}
    config = completed(config)
    heads = int(config["num_attention_heads"])
    return {
        "self_attn.q_proj": heads,
        "self_attn.k_proj": int(config.get("num_key_value_heads") or heads),
    }


def architecture_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The GGUF keys of a `config.json`. BadInput: `writable_rules`, a missing key, or inexpressible RoPE."""
    rules, config = writable_rules(config), completed(config)
    try:
        shape = {gguf_key: int(config[name]) for name, gguf_key in SHAPE_KEYS.items()}
        vocab_size = int(config["vocab_size"])
    except KeyError as error:
        raise BadInput(f"config.json lacks {error.args[0]!r}") from error
    heads = shape["attention.head_count"]
    head_dim = head_dim_of(config)
    epsilon, epsilon_key = rules.epsilon
    keys: dict[str, Any] = {
        **shape,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        epsilon_key: float(config.get(epsilon, 1e-6)),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope_of(config)["rope_theta"]),
        "vocab_size": vocab_size,
        **_rope_scaling_keys(config),
    }
    for name, gguf_key in rules.keys.items():
        if (value := config.get(name)) is not None:
            keys[gguf_key] = value
    prefix = rules.architecture
    return {"general.architecture": prefix, **{f"{prefix}.{key}": v for key, v in keys.items()}}


def rope_factors(config: Mapping[str, Any]) -> npt.NDArray[np.float32] | None:
    """`rope_freqs`: divisors of the RoPE frequencies, float32 `[head_dim / 2]`, for Llama 3; else None."""
    scaling = rope_of(config)
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    head_dim = head_dim_of(config)
    exponents = np.arange(0, head_dim, 2) / head_dim
    wavelengths = 2 * math.pi * float(scaling["rope_theta"]) ** exponents
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    num_rotations = float(scaling["original_max_position_embeddings"]) / wavelengths
    smooth = ((num_rotations - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    given = rope_options(completed(config))
    if original := config.get("original_max_position_embeddings"):
        given["original_max_position_embeddings"] = original
    return given


def _rope_scaling_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = rope_of(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "llama3"):
        return {}
    usual = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
    if kind not in ("linear", "yarn") or set(scaling) - usual:
        raise BadInput(f"rope_type {kind!r} with {sorted(set(scaling))} cannot be written as GGUF")
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings")
        original = original or config.get("max_position_embeddings") or 0
        keys["rope.scaling.original_context_length"] = int(original)
    return keys


_TOP = ("model.embed_tokens", "model.norm", "lm_head")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def to_gguf(module: str, architecture: str = "llama") -> str | None:
    """`blk.3.attn_q` for `model.layers.3.self_attn.q_proj`, None if GGUF has no name; experts share one."""
    known = _tensor_map(architecture)
    layer = _HF_LAYER.fullmatch(module)
    if layer is None:
        return known.get(module) if module in _TOP else None
    stem = EXPERT.sub(".experts.", layer[2])
    name = known.get(f"model.layers.0.{stem}")
    return name and name.replace("blk.0.", f"blk.{layer[1]}.", 1)


def from_gguf(module: str, rules: GgufRules) -> str | None:
    layer = _GGUF_LAYER.fullmatch(module)
    stems = _stems_by_name(rules.architecture, rules.stems)
    stem = stems.get(module if layer is None else layer[2])
    return stem if layer is None or stem is None else f"model.layers.{layer[1]}.{stem}"


def to_interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permute rows `[heads * head_dim, ...]` from half-split (NeoX) to GGUF llama's interleaved RoPE."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@cache
def _tensor_map(architecture: str) -> dict[str, str]:
    """GGUF names of the tensors of one layer, by every name that the `gguf` package knows."""
    gguf = import_extra("a GGUF file", "gguf", "gguf")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[architecture], 1).mapping
    return {name: tensor for name, (_, tensor) in table.items()}


@cache
def _stems_by_name(architecture: str, stems: tuple[str, ...]) -> dict[str, str]:
    """Modules by their GGUF names, those of layers without `blk.N.`."""
    known = _tensor_map(architecture)
    named = {known[name]: name for name in _TOP if name in known}
    layers = {known[f"model.layers.0.{stem}"].removeprefix("blk.0."): stem for stem in stems}
    return named | layers
