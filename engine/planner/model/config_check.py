"""Validation of `config.json` fields: types and ranges, reported by field name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....quant.base.errors import BadInput

MAX_LAYERS = 10_000
MAX_COUNT = 10**9

_COUNTS = frozenset(
    {
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "intermediate_size_mlp",
        "n_inner",
        "ffn_hidden_size",
        "vocab_size",
        "max_position_embeddings",
        "sliding_window",
        "sliding_window_pattern",
        "attention_chunk_size",
        "no_rope_layer_interval",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        # Older names of some of them.
        "n_embd",
        "d_model",
        "n_layer",
        "n_layers",
        "n_head",
        "n_heads",
        "num_kv_heads",
        "n_head_kv",
        "n_positions",
        "num_experts",
        "n_routed_experts",
        "experts_per_token",
    }
)
_COUNTS_FROM_ZERO = frozenset(
    {"n_shared_experts", "first_k_dense_replace", "max_window_layers", "num_ln_in_parallel_attn"}
)
_FLAGS = frozenset(
    {
        "tie_word_embeddings",
        "use_sliding_window",
        "attention_bias",
        "mlp_bias",
        "bias",
        "multi_query",
        "parallel_attn",
        "new_decoder_architecture",
    }
)
_LISTS = frozenset({"layer_types", "no_rope_layers", "moe_layers", "mlp_only_layers"})
_OBJECTS = frozenset({"text_config", "rope_scaling", "quantization_config"})
# Fields for which an explicit null has a meaning.
_NULLABLE = frozenset(
    {
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "attention_chunk_size",
        "q_lora_rank",
        "n_shared_experts",
        *_FLAGS,
    }
)


def check_kinds(raw: Mapping[str, Any]) -> None:
    """Check the type and range of each known field; nulls are skipped.

    Raises:
        BadInput: naming the first invalid field.
    """
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
        elif key in _OBJECTS and not isinstance(value, Mapping):
            raise _invalid(key, value, "an object")


def check_depth(raw: Mapping[str, Any]) -> None:
    """Check the number of layers of a config that is probed, before a module of that depth is built.

    Raises:
        BadInput: it is no sensible number.
    """
    for part in (raw, raw.get("text_config")):
        if isinstance(part, Mapping) and part.get("num_hidden_layers") is not None:
            _check_count("num_hidden_layers", part["num_hidden_layers"], 1)


def check_nulls(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check that no field with a family default is null.

    Raises:
        BadInput: naming the first that is.
    """
    for key in defaults:
        if config.get(key) is None and key not in _NULLABLE:
            raise _invalid(key, None, "a value, or no such field for the usual one")


def _check_count(key: str, value: Any, minimum: int) -> None:
    maximum = MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise _invalid(key, value, f"a whole number from {minimum} to {maximum:,}")


def _invalid(key: str, value: Any, wanted: str) -> BadInput:
    return BadInput(f"{key} is {value!r} in the config: {wanted} is needed")
