"""Tensor names in GGUF and Hugging Face checkpoints, and the row permutation of q and k for RoPE.

Names are those of the `gguf` package's tensor map. Where a file is read, the Hugging Face name is the one
that the family of its architecture has.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module

import torch

from ..base.errors import BadInput
from ..families.family import GgufRules

_TOP = ("model.embed_tokens", "model.norm", "lm_head")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def to_gguf(module: str, architecture: str = "llama") -> str | None:
    """`blk.3.attn_q` for `model.layers.3.self_attn.q_proj`; None for a module without a GGUF name.

    All experts' linears of a layer have the name of the one tensor that holds them.

    Raises:
        BadInput: the package `gguf` is not installed.
    """
    known = _tensor_map(architecture)
    layer = _HF_LAYER.fullmatch(module)
    if layer is None:
        return known.get(module) if module in _TOP else None
    stem = _EXPERT.sub(".experts.", layer[2])
    name = known.get(f"model.layers.0.{stem}")
    return name and name.replace("blk.0.", f"blk.{layer[1]}.", 1)


def expert_of(module: str) -> int | None:
    """The number of the expert that a linear belongs to; None: to none."""
    expert = _EXPERT.search(module)
    return int(expert[1]) if expert else None


def from_gguf(module: str, rules: GgufRules) -> str | None:
    """Inverse of `to_gguf` for a model of a family; None: it has no such tensor."""
    layer = _GGUF_LAYER.fullmatch(module)
    stem = _stems_by_name(rules.architecture, rules.stems).get(
        module if layer is None else layer[2]
    )
    return stem if layer is None or stem is None else f"model.layers.{layer[1]}.{stem}"


def to_interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permute rows `[heads * head_dim, ...]` from half-split (NeoX) to interleaved (GPT-J) RoPE.

    GGUF's llama architecture rotates channels 2i and 2i + 1 of a head, Hugging Face's i and i + half.
    """
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Inverse of `to_interleaved`."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@cache
def _tensor_map(architecture: str) -> dict[str, str]:
    """GGUF names of the tensors of one layer, by every name that the `gguf` package knows."""
    try:
        gguf = import_module("gguf")
    except ImportError as error:
        raise BadInput(
            "GGUF files need the package gguf for their tensor names: pip install 'llmopt[gguf]'"
        ) from error
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[architecture], 1).mapping
    return {name: tensor for name, (_, tensor) in table.items()}


@cache
def _stems_by_name(architecture: str, stems: tuple[str, ...]) -> dict[str, str]:
    """Modules by their GGUF names, those of layers without `blk.N.`."""
    known = _tensor_map(architecture)
    named = {known[name]: name for name in _TOP if name in known}
    layers = {known[f"model.layers.0.{stem}"].removeprefix("blk.0."): stem for stem in stems}
    return named | layers
