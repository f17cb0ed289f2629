"""A tiny config of any transformers model type: the class's own defaults, every size shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Sizes of a tiny model; a field that a config class has under one of these names is set to it. With few index
# heads most scores of a sparse indexer are zero, and which of the ties it keeps differs between chunks.
SIZES: Mapping[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embedding_dim": 64,
    "intermediate_size": 96, "n_inner": 96, "ffn_hidden_size": 96, "ffn_dim": 96, "intermediate_dim": 96,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "num_blocks": 4, "depth": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
    "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "n_positions": 1024,
    "max_seq_len": 1024, "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 32,
    "sliding_window": 64, "attention_chunk_size": 64, "image_size": 32, "patch_size": 16,
    "projection_dim": 64, "text_hidden_size": 64, "rotary_dim": 8,
    "out_hidden_size": 64,
}  # fmt: skip


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The config of a type with small sizes; `changes` are set last and may be nested by dots.

    Raises:
        Exception: whatever the config class raises.
    """
    kind = CONFIG_MAPPING[model_type]
    return kind(**_values(kind, dict(changes or {})))


def _values(kind: Any, changes: dict[str, Any]) -> dict[str, Any]:
    default = kind()
    values = {}
    for name, size in SIZES.items():
        present = vars(default).get(name)
        if name in kind.__dataclass_fields__ and present is not None and _same(present, size):
            values[name] = size
    if "qk_rope_head_dim" in values and "head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]  # latent attention: the RoPE part
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    rope = vars(default).get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope and "rope_parameters" not in values:
        values["rope_parameters"] = {
            **rope,
            "mrope_section": [2, 3, 3],
            "partial_rotary_factor": 1.0,
        }
    vocabulary = values.get("vocab_size", 0)
    for name, present in vars(default).items():
        if name.endswith("token_id") and isinstance(present, int) and present >= vocabulary > 0:
            values[name] = 1 if name == "pad_token_id" else vocabulary - 1
    for name in getattr(kind, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict"):
            inner = {k.split(".", 1)[1]: v for k, v in changes.items() if k.startswith(f"{name}.")}
            own = _values(type(part), inner)
            values[name] = {"model_type": part.model_type, **own}
    return {**values, **{key: value for key, value in changes.items() if "." not in key}}


def _same(present: Any, size: Any) -> bool:
    return isinstance(present, int) and not isinstance(present, bool) and isinstance(size, int)
