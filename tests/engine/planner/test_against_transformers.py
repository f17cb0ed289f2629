"""Tiny models of every family, built by transformers: their parameters and their real caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.engine.planner.engine_rules import RULES, CacheKnobs
from llmopt.quant.families.config import has_table_rule, model_shape
from llmopt.quant.families.registry import all_families
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, one KV head": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 32},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "mixtral": {"model_type": "mixtral", **MIXTURE},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "sliding_window": 16},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 16,
        "num_hidden_layers": 7,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 16},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 32, "sliding_window": 16, **MIXTURE},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256},
    "falcon": {"model_type": "falcon", "multi_query": True, "bias": True},
    "falcon, new layout": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", "topk_method": "greedy", **LATENT},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "llama4_text": {
        "model_type": "llama4_text",
        "head_dim": 32,
        "intermediate_size_mlp": 80,
        "attention_chunk_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
}


def config_of(name: str) -> dict[str, Any]:
    config = {**COMMON, **CONFIGS[name]}
    if config["model_type"] == "gpt2":
        config = {key: config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    return {**config, **CONFIGS[name]}


def test_every_family_has_a_tiny_model() -> None:
    known = {each.name for each in all_families() if has_table_rule({"model_type": each.name})}
    assert {config["model_type"] for config in CONFIGS.values()} == known


def built(name: str, device: str) -> Any:
    config = config_of(name)
    theirs = AutoConfig.for_model(**config)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_on_the_meta_device(name: str) -> None:
    parameters = sum(p.numel() for p in built(name, "meta").parameters())
    assert model_shape(config_of(name)).num_parameters == parameters


def cache_elements(cache: Any) -> int:
    return sum(tensor.numel() for layer in cache.layers for tensor in (layer.keys, layer.values))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_is_that_of_a_real_forward(name: str) -> None:
    """Inside every window, and past it. The rule knows the one exception of transformers: the new Falcon
    layout is cached after each KV head was copied to its query heads."""
    shape = model_shape(config_of(name))
    model = built(name, "cpu")
    rule = RULES["transformers"]
    for length in (8, 48):
        with torch.no_grad():
            cache = model(torch.full((1, length), 3), use_cache=True).past_key_values
            # A second step, because some layers cut to their window only when they are appended to.
            cache = model(torch.full((1, 1), 3), past_key_values=cache).past_key_values
        held = 4 * cache_elements(cache)
        assert rule.kv_bytes(shape, length + 1, 4, CacheKnobs()) == held
    if name != "falcon, new layout":
        assert rule.kv_bytes(shape, 1, 4, CacheKnobs()) == shape.kv_bytes_per_token(4)
