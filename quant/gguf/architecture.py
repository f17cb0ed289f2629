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

from ..base.errors import BadInput
from ..base.extras import import_extra
from ..families.family import GgufRules, ModelFamily
from ..families.registry import all_families, model_family, type_of
from ..model.checkpoint import read_json
from .container import GgufFile

if TYPE_CHECKING:
    import torch

ROPE_FACTORS = "rope_freqs.weight"
# RoPE scaling of Llama 3.1 to 3.3; GGUF stores only the resulting frequency factors.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Fields that transformers writes under another name than older configs have.
_ALIASES = {"num_experts": "num_local_experts"}
_SHAPE_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}


def gguf_families() -> dict[str, GgufRules]:
    """The rules of every model type that can be written as GGUF."""
    return {family.name: family.gguf for family in all_families() if family.gguf is not None}


def gguf_rules(config: Mapping[str, Any]) -> GgufRules:
    """The rules of a `config.json`.

    Raises:
        BadInput: an unsupported model type or feature.
    """
    family = model_family(type_of(config))
    if family is None or family.gguf is None or family.name != type_of(config):
        raise BadInput(
            f"model type {type_of(config)!r} cannot be written as GGUF: supported are "
            f"{', '.join(gguf_families())}"
        )
    rules = family.gguf
    activation = config.get("hidden_act") or config.get("hidden_activation")
    if activation is not None and activation not in rules.activations:
        raise BadInput(f"hidden_act {activation!r} cannot be written as GGUF")
    for name, value in rules.constants.items():
        if config.get(name, value) != value:
            raise BadInput(f"{name} {config[name]!r} cannot be written as GGUF: only {value!r}")
    _check_window(config, rules)
    scale = config.get("query_pre_attn_scalar")
    if scale is not None and scale != head_dim_of(config, rules):
        raise BadInput(f"query_pre_attn_scalar {scale} cannot be written as GGUF: only the head's")
    return rules


def head_dim_of(config: Mapping[str, Any], rules: GgufRules) -> int:
    """Width of an attention head."""
    default = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config.get("head_dim") or rules.head_dim or default)


def _check_window(config: Mapping[str, Any], rules: GgufRules) -> None:
    """Raise BadInput for a sliding window that llama.cpp would not keep."""
    window = config.get("sliding_window", rules.default_window)
    slides = rules.slides or config.get("use_sliding_window", False)
    if not slides or "sliding_window" in rules.keys:
        return
    if window is not None and window < config.get("max_position_embeddings", window):
        raise BadInput(f"a sliding window of {window} tokens cannot be written as GGUF")


def architecture_of(config: Mapping[str, Any]) -> str:
    """The `general.architecture` of a `config.json`.

    Raises:
        BadInput: an unsupported model type or feature.
    """
    return gguf_rules(config).architecture


def permuted_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Linears whose rows GGUF permutes (interleaved RoPE), with their number of heads."""
    if not gguf_rules(config).permuted:
        return {}
    heads = int(config["num_attention_heads"])
    return {
        "self_attn.q_proj": heads,
        "self_attn.k_proj": int(config.get("num_key_value_heads") or heads),
    }


def architecture_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The GGUF metadata keys of a `config.json`.

    Raises:
        BadInput: see `architecture_of`; a missing key, or RoPE scaling that GGUF cannot express.
    """
    rules = gguf_rules(config)
    name = rules.architecture
    try:
        shape = {ours: int(config[theirs]) for theirs, ours in _SHAPE_KEYS.items()}
        vocab_size = int(config["vocab_size"])
    except KeyError as error:
        raise BadInput(f"config.json lacks {error.args[0]!r}") from error
    heads = shape["attention.head_count"]
    head_dim = head_dim_of(config, rules)
    epsilon, epsilon_key = rules.epsilon
    keys: dict[str, Any] = {
        **shape,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        epsilon_key: float(config.get(epsilon, 1e-6)),
        "rope.dimension_count": head_dim,
        "rope.freq_base": _rope(config)[0],
        "vocab_size": vocab_size,
        **_rope_scaling_keys(config),
    }
    for ours, key in rules.keys.items():
        value = config.get(ours, config.get(_ALIASES.get(ours, ours)))
        if value is not None:
            keys[key] = value
    return {"general.architecture": name, **{f"{name}.{key}": v for key, v in keys.items()}}


def rope_factors(config: Mapping[str, Any]) -> npt.NDArray[np.float32] | None:
    """`rope_freqs`: divisors of the RoPE frequencies, float32 `[head_dim / 2]`, for Llama 3; else None."""
    theta, scaling = _rope(config)
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    head_dim = head_dim_of(config, gguf_rules(config))
    exponents = np.arange(0, head_dim, 2) / head_dim
    wavelengths = 2 * math.pi * theta**exponents
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    num_rotations = float(scaling["original_max_position_embeddings"]) / wavelengths
    smooth = ((num_rotations - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def stored_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` beside a file, or without one that of its keys; no `quantization_config`.

    Raises:
        BadInput: a part of a split model, a config of another model, or see `config_of`.
    """
    if int(file.metadata.get("split.count", 0)) > 1:
        raise BadInput(f"{file.path} is one part of several: merge them with llama-gguf-split")
    from_keys = config_of(file)
    beside = file.path.parent / "config.json"
    if not beside.is_file():
        return from_keys
    config = read_json(beside)
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for name in (*same, "vocab_size"):
        if config.get(name) != from_keys[name]:
            raise BadInput(
                f"{beside} has {name} {config.get(name)!r}, but {file.path.name} beside it has "
                f"{from_keys[name]}: they do not belong together"
            )
    config.pop("quantization_config", None)
    return config


def config_of(file: GgufFile) -> dict[str, Any]:
    """The `config.json` derived from a file's keys and tensors.

    Raises:
        BadInput: another architecture, or a missing key.
    """
    keys = file.metadata
    if "general.architecture" not in keys:
        raise BadInput(f"{file.path} lacks the key general.architecture: it is no whole model")
    if keys.get("general.type") == "mmproj" or keys["general.architecture"] == "clip":
        raise BadInput(
            f"{file.path} holds the vision side of a model (mmproj): give the file of its language model"
        )
    name = str(keys.get("general.architecture"))
    family = _family_named(name, sparse=bool(keys.get(f"{name}.expert_count")))
    if family is None or (rules := family.gguf) is None:
        if keys.get(f"{name}.expert_count"):
            raise BadInput(f"{file.path}: a mixture of experts of {name!r} is not read here")
        known = ", ".join(dict.fromkeys(each.architecture for each in gguf_families().values()))
        raise BadInput(f"{file.path}: architecture {name!r} is not read here: {known} are")

    def key(short: str) -> Any:
        if f"{name}.{short}" not in keys:
            raise BadInput(f"{file.path} lacks the key {name}.{short}: it is no whole model")
        return keys[f"{name}.{short}"]

    def size(short: str) -> int:
        value = key(short)
        if not isinstance(value, int) or value < 1:
            raise BadInput(f"{file.path}: {name}.{short} is {value!r}, not a number above 0")
        return value

    for needed in ("token_embd.weight", "output_norm.weight"):
        if needed not in file.tensors:
            raise BadInput(f"{file.path} lacks tensor {needed}: it is no whole model")
    config: dict[str, Any] = {
        "model_type": family.name,
        "hidden_act": rules.activations[-1],
        **{theirs: size(ours) for theirs, ours in _SHAPE_KEYS.items()},
        rules.epsilon[0]: _shortest(key(rules.epsilon[1])),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": "bfloat16",
    }
    heads = config["num_attention_heads"]
    for ours, theirs, otherwise in (
        ("num_key_value_heads", "attention.head_count_kv", heads),
        ("head_dim", "attention.key_length", config["hidden_size"] // heads),
    ):
        config[ours] = size(theirs) if f"{name}.{theirs}" in keys else otherwise
    for ours, theirs in rules.keys.items():
        value = keys.get(f"{name}.{theirs}")
        if value is not None:
            config[ours] = _shortest(value) if isinstance(value, float) else value
    if rules.norm_offset:  # Gemma's, whose classes have another name for it
        config["hidden_activation"] = config["hidden_act"]
        config["query_pre_attn_scalar"] = config["head_dim"]
    config["rope_parameters"] = _rope_parameters(file, name, config)
    for token in ("bos", "eos"):
        if f"tokenizer.ggml.{token}_token_id" in keys:
            config[f"{token}_token_id"] = keys[f"tokenizer.ggml.{token}_token_id"]
    return config


def _family_named(architecture: str, *, sparse: bool) -> ModelFamily | None:
    """The family that is made from a file of an architecture without a `config.json`: the first of it."""
    for family in all_families():
        rules = family.gguf
        if rules is not None and rules.architecture == architecture and rules.sparse == sparse:
            return family
    return None


def _rope_parameters(file: GgufFile, name: str, config: dict[str, Any]) -> dict[str, Any]:
    keys = file.metadata
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _shortest(keys.get(f"{name}.rope.freq_base", 10000.0)),
    }
    kind = keys.get(f"{name}.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": _shortest(keys[f"{name}.rope.scaling.factor"])}
        original = keys.get(f"{name}.rope.scaling.original_context_length")
        if original is not None:
            parameters["original_max_position_embeddings"] = int(original)
    elif kind != "none":
        raise BadInput(f"{file.path}: rope scaling {kind!r} is not read here")
    if ROPE_FACTORS in file.tensors:
        stored = file.data(ROPE_FACTORS).view(np.float32)
        candidate = {"rope_type": "llama3", "factor": float(stored.max()), **_LLAMA3_ROPE}
        expected = rope_factors(config | {"rope_parameters": parameters | candidate})
        if (
            expected is None
            or stored.shape != expected.shape
            or not np.allclose(stored, expected, rtol=1e-4)
        ):
            raise BadInput(
                f"{file.path}: its rope_freqs are not Llama 3's: put the model's config.json beside it"
            )
        parameters |= candidate
    return parameters


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-06, and not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """RoPE base (theta) and scaling parameters."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(given.get("rope_theta", config.get("rope_theta", 10000.0))), given


def _rope_scaling_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    _, scaling = _rope(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "llama3"):
        return {}
    usual = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
    if kind not in ("linear", "yarn") or set(scaling) - usual:
        raise BadInput(f"rope_type {kind!r} with {sorted(set(scaling))} cannot be written as GGUF")
    keys: dict[str, Any] = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": float(scaling["factor"]),
    }
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings") or config.get(
            "max_position_embeddings"
        )
        keys["rope.scaling.original_context_length"] = int(original or 0)
    return keys


_TOP = ("model.embed_tokens", "model.norm", "lm_head")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def to_gguf(module: str, architecture: str = "llama") -> str | None:
    """`blk.3.attn_q` for `model.layers.3.self_attn.q_proj`; None for a module without a GGUF name.

    All experts' linears of a layer have the name of the one tensor that holds them.

    Raises:
        BadInput: the package `gguf` is not installed.
    """
    known = _tensor_map(architecture)
    layer = _HF_LAYER.fullmatch(module)
    if layer is None:
        return known.get(module) if module in _TOP else None
    stem = _EXPERT.sub(".experts.", layer[2])
    name = known.get(f"model.layers.0.{stem}")
    return name and name.replace("blk.0.", f"blk.{layer[1]}.", 1)


def expert_of(module: str) -> int | None:
    """The number of the expert that a linear belongs to; None: to none."""
    expert = _EXPERT.search(module)
    return int(expert[1]) if expert else None


def from_gguf(module: str, rules: GgufRules) -> str | None:
    """Inverse of `to_gguf` for a model of a family; None: it has no such tensor."""
    layer = _GGUF_LAYER.fullmatch(module)
    stem = _stems_by_name(rules.architecture, rules.stems).get(
        module if layer is None else layer[2]
    )
    return stem if layer is None or stem is None else f"model.layers.{layer[1]}.{stem}"


def to_interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permute rows `[heads * head_dim, ...]` from half-split (NeoX) to interleaved (GPT-J) RoPE.

    GGUF's llama architecture rotates channels 2i and 2i + 1 of a head, Hugging Face's i and i + half.
    """
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Inverse of `to_interleaved`."""
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
