"""A config that leaves fields out means what the class of transformers has for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.families.config import model_shape
from llmopt.quant.families.registry import all_families
from llmopt.quant.gguf.architecture import architecture_keys, gguf_families
from transformers import AutoConfig

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "layer_types")
SIZES = (*SIZES, "intermediate_size", "max_position_embeddings", "n_embd", "n_head", "n_layer")
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},  # transformers has no default
    "qwen3_moe": {"norm_topk_prob": True},  # GGUF expresses no other
}
WITH_DEFAULTS = [
    family.name
    for family in all_families()
    if family.rules is not None and family.rules.defaults is not None
]


def short_and_full(model_type: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config of sizes alone, and all fields of the same one as transformers fills them in."""
    changes |= NEEDED.get(model_type, {})
    config = AutoConfig.for_model(model_type, **changes)
    full = json.loads(config.to_json_string(use_diff=False)) | {"model_type": model_type}
    sizes = {name: full[name] for name in SIZES if full.get(name) is not None}
    return {"model_type": model_type, **sizes, **changes}, full


@pytest.mark.parametrize("model_type", WITH_DEFAULTS)
def test_shapes_of_short_configs(model_type: str) -> None:
    short, full = short_and_full(model_type)
    assert model_shape(short) == model_shape(full)


@pytest.mark.parametrize("model_type", gguf_families())
def test_gguf_keys_of_short_configs(model_type: str) -> None:
    """The context is no longer than Mistral's window, which GGUF has no key for."""
    short, full = short_and_full(model_type, max_position_embeddings=4096)
    keys = architecture_keys(short)
    assert keys == architecture_keys(full)
    config = AutoConfig.for_model(model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert keys[f"{keys['general.architecture']}.attention.key_length"] == head_dim


def test_gemma_2_scales_by_its_own_number() -> None:
    """256 is the class's; llama.cpp scales heads of 128 by another, and has no key for it."""
    short, _ = short_and_full("gemma2", max_position_embeddings=4096)
    with pytest.raises(BadInput, match="query_pre_attn_scalar 256 cannot be written"):
        architecture_keys(short | {"head_dim": 128})
