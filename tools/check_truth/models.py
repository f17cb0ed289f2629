"""Tiny random models of many families, in transformers' own classes.

Runs in the environments of other packages: nothing here is llmopt's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER = Path(__file__).parents[2] / "recipes" / "models" / "stories260K"
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    # No group of 128 divides 192 inputs, and 32 divides 416.
    "llama-192": {
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 416,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    # Not even 32 divides 344 inputs.
    "llama-344": {"model_type": "llama", "intermediate_size": 344},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**GEMMA, "sliding_window": 128, "num_hidden_layers": 6},
    "gemma2": {**GEMMA, "sliding_window": 128},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "granite": {},
}


def write_model(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A plain checkpoint with the bundled tokenizer."""
    options = {**COMMON, **FAMILIES[family]}
    config = AutoConfig.for_model(options.pop("model_type", family), **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
            elif name.endswith("bias"):
                parameter.normal_(std=0.01)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Copy the bundled tokenizer, and write a generation config whose end token is the tokenizer's."""
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, folder)
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
