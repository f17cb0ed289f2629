"""Completion of a raw `config.json` without transformers: family, synonyms, defaults, checks by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import is_number
from .family import ModelFamily
from .registry import all_families, model_family, type_of
from .shape_rules import Config
from .shapes import ModelShape

_MAX_LAYERS = 10_000
_MAX_COUNT = 10**9
_CLASSIFIER = "ForSequenceClassification"

# Config key synonyms: the planner reads the first.
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("experts_per_token",),
}
_COUNTS = {
    *(name for key, synonyms in _SYNONYMS.items() for name in (key, *synonyms)),
    *("head_dim", "intermediate_size_mlp", "vocab_size", "moe_intermediate_size"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("sliding_window", "sliding_window_pattern", "attention_chunk_size"),
    *("no_rope_layer_interval", "decoder_sparse_step", "interleave_moe_layer_step"),
}
_COUNTS_FROM_ZERO = {
    *("n_shared_experts", "first_k_dense_replace", "max_window_layers", "num_ln_in_parallel_attn")
}
_FLAGS = {
    *("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias", "bias"),
    *("multi_query", "parallel_attn", "new_decoder_architecture"),
}
_LISTS = {"layer_types", "no_rope_layers", "moe_layers", "mlp_only_layers"}
_NUMBERS = {"rope_theta", "rms_norm_eps", "layer_norm_eps", "norm_epsilon"}
_OBJECTS = {"text_config", "rope_scaling", "rope_parameters", "quantization_config"}
# Fields for which an explicit null has a meaning.
_NULLABLE = {
    *("num_key_value_heads", "head_dim", "sliding_window", "attention_chunk_size"),
    *("q_lora_rank", "n_shared_experts", *_FLAGS),
}


def current_names(raw: Config) -> Config:
    """The config under the architecture's own name, with the fields that its former name implied."""
    family = model_family(type_of(raw))
    if family is None or family.name == type_of(raw):
        return raw
    return {**family.other_names[type_of(raw)], **raw, "model_type": family.name}


def has_table_rule(raw: Config) -> bool:
    """True if a family has this config's defaults: those of a text model alone."""
    raw = current_names(raw)
    if not isinstance(raw.get("text_config"), Mapping):
        return _with_defaults(type_of(raw)) is not None
    if raw.get("vision_config") or raw.get("audio_config"):
        return False
    return _with_defaults(f"{type_of(raw)}_text") is not None


def _with_defaults(name: str) -> ModelFamily | None:
    family = model_family(name)
    if family is None or family.name != name or family.rules is None:
        return None
    return None if family.rules.defaults is None else family


def model_shape(raw: Config) -> ModelShape:
    """Shape of a raw `config.json`, or its text model. BadInput: an unknown type, or an invalid field."""
    family, config = complete(raw)
    return family.shape(config)


def complete(raw: Config) -> tuple[ModelFamily, dict[str, Any]]:
    """Family of the text model, and its config with defaults. BadInput: no type, or one without defaults."""
    raw = current_names(raw)
    check_kinds(raw)
    config: dict[str, Any] = dict(raw)
    if isinstance(nested := raw.get("text_config"), Mapping):
        outer = type_of(raw)
        config = {"model_type": f"{outer}_text", **nested}
        # transformers reads the outer flag alone, whatever the text config says.
        wrapper = model_family(outer)
        tied = raw.get("tie_word_embeddings", wrapper.ties_wrapped if wrapper else None)
        if tied is not None:
            config["tie_word_embeddings"] = tied
        check_kinds(config)
    check_type(config)
    family = _with_defaults(type_of(config))
    if family is None or family.rules is None or family.rules.defaults is None:
        known = sorted(item.name for item in all_families() if _with_defaults(item.name))
        raise BadInput(
            f"model type {type_of(config)!r} is not known here, nor its attention pattern; "
            f"known: {', '.join(known)}"
        )
    defaults = family.rules.defaults
    for name, synonyms in _SYNONYMS.items():
        values = [config[key] for key in (name, *synonyms) if config.get(key) is not None]
        if values:
            config[name] = values[0]
    filled = {**defaults, **config}
    if "n_routed_experts" in defaults:
        filled.setdefault("num_local_experts", filled["n_routed_experts"])
    for key in defaults:
        if filled.get(key) is None and key not in _NULLABLE:
            raise _invalid(key, None, "a value, or no such field for the usual one")
    return family, filled


def is_classifier(config: Config) -> bool:
    return any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ())


def check_type(config: Config) -> None:
    if not type_of(config):
        raise BadInput("config.json has no model_type: it does not say which architecture it is")


def check_kinds(raw: Mapping[str, Any]) -> None:
    """Raises BadInput for the first known field of a wrong type or range; nulls are skipped."""
    for key, value in raw.items():
        if value is None:
            continue
        if key in _COUNTS:
            _check_count(key, value, 1)
        elif key in _COUNTS_FROM_ZERO:
            _check_count(key, value, 0)
        elif key in _FLAGS and not isinstance(value, bool):
            raise _invalid(key, value, "true or false")
        elif key in _LISTS:
            kind = str if key == "layer_types" else int
            if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
                raise _invalid(key, value, f"a list of {'names' if kind is str else 'numbers'}")
        elif key in _NUMBERS and not is_number(value):
            raise _invalid(key, value, "a number")
        elif key in _OBJECTS and not isinstance(value, Mapping):
            raise _invalid(key, value, "an object")


def check_depth(raw: Mapping[str, Any]) -> None:
    """Raises BadInput for a senseless number of layers, before a module of that depth is probed."""
    for part in (raw, raw.get("text_config")):
        if isinstance(part, Mapping) and part.get("num_hidden_layers") is not None:
            _check_count("num_hidden_layers", part["num_hidden_layers"], 1)


def _check_count(key: str, value: Any, minimum: int) -> None:
    maximum = _MAX_LAYERS if key == "num_hidden_layers" else _MAX_COUNT
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise _invalid(key, value, f"a whole number from {minimum} to {maximum:,}")


def _invalid(key: str, value: Any, wanted: str) -> BadInput:
    return BadInput(f"{key} is {value!r} in the config: {wanted} is needed")
