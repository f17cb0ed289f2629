"""Models as GGUF files for tests: stories3M, and small random ones of the architectures that GGUF has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.gguf.architecture import gguf_architecture
from llmopt.quant.gguf.assemble import assemble, gguf_name
from llmopt.quant.gguf.mix import mix, shape_of
from llmopt.quant.kinds.ggml.formats import GgufFormat
from llmopt.quant.kinds.ggml.tensor import GgufTensor, quantize_blocks
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

STORIES = MODELS / "stories3M"
TEXT = MODELS.parent / "data" / "calibration.txt"
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Every architecture, tied and untied, with and without biases, and a head width of its own.
RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "rope_parameters": ROPE_LLAMA3},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 128},
    "gemma": {"model_type": "gemma", "head_dim": 64, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 128,
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": None},
    # llama.cpp looks for Phi-3's own tokens where that is the model's name.
    "phi": {"model_type": "phi3", "sliding_window": None, "pad_token_id": 0},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 64, "tie_word_embeddings": False},
}
# How Llama 3 and Qwen2 split text, as their tokenizer.json say it.
SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def random_model(folder: Path, name: str) -> Path:
    """A random model of 2 layers, hidden 256, vocabulary 512; biases and norms are no constants."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "bos_token_id": 1 if name.startswith("llama") else 0,
        "eos_token_id": 2 if name.startswith("llama") else 1,
        **RANDOM_MODELS[name],
    }
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2)
    model.save_pretrained(folder)
    if name.startswith("llama"):
        for file in STORIES.glob("*token*"):
            shutil.copy(file, folder)
    else:
        byte_level_tokenizer(folder, "qwen2")
    return folder


def byte_level_tokenizer(folder: Path, split: str | None) -> None:
    """A byte-level BPE tokenizer of 500 ids, trained on the bundled stories; `split` as in `SPLITS`."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[split]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.read_text(encoding="utf-8").splitlines()[:150], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def linears_of(source: Checkpoint) -> dict[str, tuple[int, int]]:
    """Widths of the linears of all layers."""
    endings = ("_proj.weight", ".c_fc.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    names = (name for name in source.names if name.endswith(endings))
    return {name.removesuffix(".weight"): _pair(source.shape(name)) for name in names}


def write_model(model: Path, folder: Path, type_name: str) -> Path:
    """`model` rounded to a GGUF type, as one file in `folder`."""
    source = Checkpoint(model)
    shape = shape_of(source.config, gguf_architecture(source.config))
    schemes = mix(type_name, linears_of(source), shape)
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors("model.layers."):
        scheme = schemes.get(name.removesuffix(".weight"))
        if scheme is None:
            stored[name] = tensor
        else:
            data = quantize_blocks(tensor.float(), scheme.type)
            stored |= GgufFormat().pack(name.removesuffix(".weight"), GgufTensor(data, scheme))
    shard = folder / "layers.safetensors"
    save_file(stored, shard)
    path = folder / gguf_name(model.name, type_name)
    assemble(source, [shard], path, schemes, type_name)
    shard.unlink()
    return path


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]
