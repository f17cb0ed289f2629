"""A tiny random checkpoint of every family, as transformers makes and saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmopt.recipes import MODELS

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 8, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 8, "first_k_dense_replace": 1, **MOE,
}  # fmt: skip
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.1}
OWN_KEYS = ("GPT2Config", "FalconConfig", "GPTJConfig", "BloomConfig")
FALCON = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("LlamaConfig", {"num_key_value_heads": 8}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("LlamaConfig", {"rope_parameters": LINEAR_ROPE}),
    "llama-biases-tied-wide-heads": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "llama-4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 80, "num_local_experts": 4,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 12, "floor_scale": 16,
            "num_experts_per_tok": 2,
        },
    ),
    "llama-4-no-norm": (
        "Llama4TextConfig",
        {
            "head_dim": 8, "intermediate_size_mlp": 80, "num_local_experts": 4, "use_qk_norm": False,
            "no_rope_layers": [1, 0, 1], "attention_chunk_size": 12, "attn_temperature_tuning": False,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 7}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 11}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding-top-layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2Config", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**MOE, "head_dim": 16, "num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe-unnormalised": ("Qwen3MoeConfig", {**MOE, "head_dim": 16, "num_experts": 4}),
    "qwen3-moe-sliding": (
        "Qwen3MoeConfig",
        {**MOE, "num_experts": 4, "use_sliding_window": True, "sliding_window": 9},
    ),
    "gemma-2": (
        "Gemma2Config",
        {
            "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        },
    ),
    "gemma-3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi-3": ("Phi3Config", {"sliding_window": 9}),
    "phi-4-longrope-partial": (
        "Phi3Config",
        {
            "hidden_size": 128, "original_max_position_embeddings": 32, "tie_word_embeddings": True,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75, "rope_theta": 1e4},
        },
    ),
    "gpt-oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 8}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {
            **LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1,
            "routed_scaling_factor": 1.5, "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "gpt-2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 256}),
    "falcon-7b": ("FalconConfig", {**FALCON}),
    "falcon-40b": (
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "falcon-11b": (
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential-heads-biases": (
        "FalconConfig",
        {**FALCON, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
}  # fmt: skip

DEEPSEEK_MOE = {
    **MOE,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LAYER_ROPES = {
    "full_attention": {**YARN_ROPE},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SLIDING = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GRANITE = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.5,
    "attention_bias": True,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 6, "final_logit_softcapping": 3.0,
    "num_kv_shared_layers": 0,
}  # fmt: skip
# Their configs are completed by transformers' classes.
COMPLETED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**MOE, "num_experts": 8, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "ministral": ("MinistralConfig", {**SLIDING, "head_dim": 16}),
    "ministral-3": (
        "Ministral3Config",
        {
            "head_dim": 16, "rope_parameters": {
                **YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    ),
    "glm-4-moe": (
        "Glm4MoeConfig",
        {**DEEPSEEK_MOE, "head_dim": 64, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
    ),
    "glm-4": ("Glm4Config", {"head_dim": 16}),
    "glm": ("GlmConfig", {"head_dim": 16, "attention_bias": False}),
    "smollm-3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "olmo-2": ("Olmo2Config", {"rms_norm_eps": 1e-5}),
    "olmo-3": ("Olmo3Config", {**SLIDING, "rope_parameters": LAYER_ROPES}),
    "granite": ("GraniteConfig", {**GRANITE, "mlp_bias": True}),
    "granite-moe": ("GraniteMoeConfig", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": (
        "MiniMaxM2Config",
        {"head_dim": 64, "rotary_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "ernie-4.5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "ernie-4.5-moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1,
            "moe_layer_end_index": 2, "tie_word_embeddings": True,
        },
    ),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 2, 2]}),
    "dots-1": (
        "Dots1Config", {**DEEPSEEK_MOE, **SLIDING, "head_dim": 16, "n_shared_experts": 2, "norm_topk_prob": True},
    ),
    "cohere": ("CohereConfig", {"attention_bias": True, "logit_scale": 0.5}),
    "cohere-2": ("Cohere2Config", {**SLIDING, "logit_scale": 0.5}),
    "exaone-4": ("Exaone4Config", {**SLIDING, "head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma-4-shared-kv": (
        "Gemma4TextConfig",
        {
            **GEMMA4, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma-3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "head_dim": 16,
            "sliding_window": 6, "intermediate_size": [96, 96, 64, 64, 96, 96], "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB - 100, "laurel_rank": 8,
            "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.0, 0.0], "final_logit_softcapping": 3.0,
        },
    ),
    "gemma-4-moe": (
        "Gemma4TextConfig",
        {
            **GEMMA4, "layer_types": SLIDING["layer_types"], "hidden_size_per_layer_input": 0,
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
    ),
    "gemma-4-keys-as-values": (
        "Gemma4TextConfig",
        {
            **GEMMA4, "layer_types": SLIDING["layer_types"], "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True, "num_global_key_value_heads": 2,
        },
    ),
}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "head_dim": 16, "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
DELTA_STATE = 2 * 4 * ((2 * 2 * 16 + 4 * 32) * 4 + 4 * 16 * 32)
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4,
    "head_dim": 16,
}  # fmt: skip
MAMBA_STATE = 4 * ((128 + 2 * 2 * 8) * 4 + 8 * 16 * 8)
QWEN_MOE = {**MOE, "num_experts": 8, "shared_expert_intermediate_size": 48}
# Beside the config: bytes of a sequence's constant state in float32.
STATEFUL: dict[str, tuple[str, dict[str, Any], int]] = {
    "lfm-2": ("Lfm2Config", {**LFM2, "conv_L_cache": 4, "block_multiple_of": 8}, 2 * 64 * 4 * 4),
    "lfm-2-moe": (
        "Lfm2MoeConfig", {**LFM2, **MOE, "num_experts": 8, "num_dense_layers": 1}, 2 * 64 * 3 * 4,
    ),
    "granite-4": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE, **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
            "position_embedding_type": "rope", "mamba_proj_bias": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        2 * MAMBA_STATE,
    ),
    "granite-4-dense": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 48, "mamba_conv_bias": False,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        2 * MAMBA_STATE,
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mlp_bias": True, "use_bias": True,
        },
        2 * MAMBA_STATE,
    ),
    "nemotron-h-moe": (
        "NemotronHConfig",
        {
            **NEMOTRON, **MOE, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32, "routed_scaling_factor": 1.5,
        },
        MAMBA_STATE,
    ),
    "qwen3-next": ("Qwen3NextConfig", {**DELTA, **QWEN_MOE, "mlp_only_layers": [1]}, DELTA_STATE),
    "qwen3.5": ("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": True}, DELTA_STATE),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**DELTA, **QWEN_MOE}, DELTA_STATE),
}  # fmt: skip
COMPLETED |= {name: family[:2] for name, family in STATEFUL.items()}
FAMILIES |= COMPLETED

# Beside the config: how transformers' modules are run, and what a token takes in the cache.
ADAPTED: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "arcee": ("ArceeConfig", {}, "PackedForward", 3 * 2 * 4 * 8),
    "starcoder-2-sliding": ("Starcoder2Config", {"sliding_window": 9}, "PackedForward", 3 * 2 * 4 * 8),
    # Layers that cache a latent of 24 elements and a shared key of 8.
    "glm-4-moe-lite": ("Glm4MoeLiteConfig", {**LATENT, "n_group": 1, "topk_group": 1}, "LatentForward", 3 * (24 + 8)),
    "bloom-alibi": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 8}, "SequentialForward", 2 * 2 * 8 * 8),
    "gpt-j": (
        "GPTJConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
        "SequentialForward",
        2 * 2 * 4 * 16,
    ),
}  # fmt: skip


def save_model(folder: Path, config_class: str, overrides: dict[str, Any]) -> Any:
    """A random model as transformers saves it, with the bundled tokenizer beside it."""
    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB} if config_class in OWN_KEYS else SHAPE
    config = getattr(transformers, config_class)(
        **{**shape, "initializer_range": 0.2, "eos_token_id": 2, **overrides}
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        saved = model.state_dict().keys()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in saved:
                continue
            # They start as ones and zeros, which hide mistakes.
            if any(
                part in name
                for part in ("norm", "ln_", "bias", "sinks", "layer_scalar", "output_scale")
            ):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif "experts." in name or "router" in name or "mlp.gate.weight" in name:
                tensor.normal_(std=0.2)
    model.eval().save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODELS / "stories260K").save_pretrained(folder)
    return model
