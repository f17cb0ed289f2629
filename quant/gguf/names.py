"""Tensor names in GGUF and Hugging Face checkpoints, and the row permutation of q and k for RoPE."""

from __future__ import annotations

import re

import torch

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_BACK = {ours: theirs for theirs, ours in _TOP.items()}
_IN_LAYER_BACK = {ours: theirs for theirs, ours in _IN_LAYER.items()}
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def to_gguf(module: str) -> str | None:
    """`blk.3.attn_q` for `model.layers.3.self_attn.q_proj`; None for a module without a GGUF name."""
    layer = _HF_LAYER.fullmatch(module)
    if layer is None:
        return _TOP.get(module)
    inner = _IN_LAYER.get(layer[2])
    return inner and f"blk.{layer[1]}.{inner}"


def expert_of(module: str) -> int | None:
    """The number of the expert that a linear belongs to; None: to none."""
    expert = _EXPERT.search(module)
    return int(expert[1]) if expert else None


def from_gguf(module: str) -> str | None:
    """Inverse of `to_gguf`."""
    layer = _GGUF_LAYER.fullmatch(module)
    if layer is None:
        return _TOP_BACK.get(module)
    inner = _IN_LAYER_BACK.get(layer[2])
    return inner and f"model.layers.{layer[1]}.{inner}"


def to_interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permute rows `[heads * head_dim, ...]` from half-split (NeoX) to interleaved (GPT-J) RoPE.

    GGUF's llama architecture rotates channels 2i and 2i + 1 of a head, Hugging Face's i and i + half.
    """
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Inverse of `to_interleaved`."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
