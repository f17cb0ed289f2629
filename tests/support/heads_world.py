"""Heads for a model, written as their authors publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_medusa(
    folder: Path,
    hidden: int = 256,
    vocab: int = 512,
    heads: int = 3,
    blocks: int = 1,
    layout: str = "authors",
    bias: bool = True,
    file: str = "medusa_lm_head.safetensors",
    seed: int = 0,
) -> Path:
    """Random Medusa heads, by the names of their authors' code or of vLLM's."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(heads):
        for block in range(blocks):
            name = (
                f"{head}.{block}.linear" if layout == "authors" else f"blocks.{head}.layers.{block}"
            )
            tensors[f"{name}.weight"] = (
                torch.randn(hidden, hidden, generator=generator) / hidden**0.5
            )
            if bias:
                tensors[f"{name}.bias"] = torch.randn(hidden, generator=generator) / 10
        name = f"{head}.{blocks}" if layout == "authors" else f"lm_heads.{head}"
        tensors[f"{name}.weight"] = torch.randn(vocab, hidden, generator=generator) / 4
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks}
    return _save(folder, config, tensors, file)


def write_eagle(
    folder: Path,
    hidden: int = 256,
    vocab: int = 512,
    heads: int = 8,
    kv_heads: int = 4,
    file: str = "model.safetensors",
    bias: bool = False,
    embedding: bool = False,
    seed: int = 0,
) -> Path:
    """A random EAGLE head, by the names of its authors' code."""
    generator = torch.Generator().manual_seed(seed)
    inner, dim = 2 * hidden, hidden // heads

    def random(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, generator=generator) / into**0.5

    tensors = {
        "fc.weight": random(hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": random(hidden, hidden),
        "layers.0.self_attn.k_proj.weight": random(kv_heads * dim, hidden),
        "layers.0.self_attn.v_proj.weight": random(kv_heads * dim, hidden),
        "layers.0.self_attn.o_proj.weight": random(hidden, hidden),
        "layers.0.post_attention_layernorm.weight": 1 + random(1, hidden)[0],
        "layers.0.mlp.gate_proj.weight": random(inner, hidden),
        "layers.0.mlp.up_proj.weight": random(inner, hidden),
        "layers.0.mlp.down_proj.weight": random(hidden, inner),
    }
    tensors |= {"fc.bias": random(1, hidden)[0]} if bias else {}
    tensors |= {"embed_tokens.weight": random(vocab, hidden)} if embedding else {}
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    return _save(folder, config, tensors, file)


def write_eagle3(
    folder: Path,
    hidden: int = 256,
    vocab: int = 512,
    scored: int = 300,
    read: int = 256,
    aux_hidden_state_layers: list[int] | None = None,
    norms_residual: bool = False,
    seed: int = 0,
) -> Path:
    """A random EAGLE-3 head of `hidden` channels for a model of `read`, by the names of its authors' code."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, inner = 8, 4, 2 * hidden
    dim = hidden // heads

    def random(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, generator=generator) / into**0.5

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {
        "self_attn.q_proj": (hidden, 2 * hidden), "self_attn.k_proj": (kv_heads * dim, 2 * hidden),
        "self_attn.v_proj": (kv_heads * dim, 2 * hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    kept = torch.randperm(vocab, generator=generator)[:scored].sort().values
    tensors = {
        "fc.weight": random(hidden, 3 * read),
        "norm.weight": 1 + random(1, hidden)[0],
        "lm_head.weight": 20 * random(scored, hidden),
        "d2t": kept - torch.arange(scored),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True),
        "embed_tokens.weight": random(vocab, hidden),
        **{f"midlayer.{name}.weight": random(*shape) for name, shape in shapes.items()},
        **{f"midlayer.{name}.weight": 1 + random(1, hidden)[0] for name in norms},
    }
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "draft_vocab_size": scored,
        "target_hidden_size": read, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "norm_before_residual": norms_residual,
    }  # fmt: skip
    config |= (
        {}
        if aux_hidden_state_layers is None
        else {"eagle_aux_hidden_state_layer_ids": aux_hidden_state_layers}
    )
    return _save(folder, config, tensors, "model.safetensors")


def _save(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], file: str
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder
