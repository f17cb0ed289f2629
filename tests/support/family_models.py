"""Tiny random models of every family, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

HIDDEN, VOCAB, LENGTH = 32, 96, 20
_BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

# Name: config class, what differs from the base.
MAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-grouped": ("LlamaConfig", {"num_key_value_heads": 2}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "mixtral": ("MixtralConfig", _EXPERTS),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "gemma2": ("Gemma2Config", _WINDOW),
    "gemma3": ("Gemma3TextConfig", _WINDOW | {"rope_local_base_freq": 100.0}),
    "phi3": ("Phi3Config", {}),
    "gpt_oss": ("GptOssConfig", _WINDOW | _EXPERTS),
    "deepseek_v2": ("DeepseekV2Config", _DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK | {"n_group": 2, "topk_group": 1}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteConfig", {"embedding_multiplier": 3.0}),
    "stablelm": ("StableLmConfig", {}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJConfig", {"n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}),
}


def make_model(name: str, vocab_size: int = VOCAB) -> Any:
    """A model with random weights, norms and biases, in float32."""
    kind, changes = (MAPPED | OTHERS)[name]
    settings = _BASE | changes
    if "n_layer" in changes:  # these have names of their own for what the base says
        settings = {"hidden_size": HIDDEN} | changes
    if name == "gpt_neox":
        del settings["num_key_value_heads"]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(settings | {"vocab_size": vocab_size}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.copy_(noise + (1.0 if bool((parameter == 1).all()) else 0.0))
    return model


def save_model(name: str, folder: Path, vocab_size: int = VOCAB) -> Any:
    """Make a model and write it to a folder; the model."""
    model = make_model(name, vocab_size)
    model.save_pretrained(folder)
    return model


def token_ids(samples: int = 3, seed: int = 1) -> torch.Tensor:
    """Random ids `[samples, LENGTH]`."""
    return torch.randint(3, VOCAB, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
