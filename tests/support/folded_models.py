"""Checkpoints with random scales in every fold, and their logits by transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.families.layer_map import LayerMap
from llmopt.quant.model.architecture import Architecture
from llmopt.quant.smoothing.discover import fold_layer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .family_models import token_ids


def fold_model(
    folder: Path, output: Path, layers: Iterable[LayerMap], architecture: Architecture
) -> int:
    """A copy of a checkpoint with random scales in every fold; how many."""
    stored = load_file(folder / "model.safetensors")
    done = 0
    for index, family in enumerate(layers):
        start = architecture.layer_prefix(index) + "."
        tensors = {
            name.removeprefix(start): tensor
            for name, tensor in stored.items()
            if name.startswith(start)
        }
        done += fold_layer(family, tensors, index)
        stored |= {start + name: tensor for name, tensor in tensors.items()}
    output.mkdir()
    save_file(stored, output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_bytes((folder / "config.json").read_bytes())
    return done


def logits_of(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(token_ids(samples=4)).logits
