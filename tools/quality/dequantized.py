"""Quantized checkpoints as plain ones, dequantized by the readers of their formats; bytes as stored."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.formats.registry import quantized_modules, read_quantized, tensor_names
from llmopt.quant.model.checkpoint import Checkpoint
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Size of the quantized linears in their files, and of all tensors there (`file_bytes`)."""

    weights: int
    bytes: int
    file_bytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


def dequantize_checkpoint(source: Path, output: Path, plain: Path) -> StoredSize:
    """A plain float32 checkpoint of a quantized one in safetensors, with the plain one's config.

    Tensors that are not quantized are the checkpoint's own: a method may have folded scales into them.
    """
    checkpoint = Checkpoint(source)
    stored = taken = 0
    used: set[str] = set()
    tensors: dict[str, torch.Tensor] = {}
    for module in sorted(quantized_modules(checkpoint)):
        names = tensor_names(checkpoint, module)
        weight = read_quantized(checkpoint, module).dequantize().float()
        taken += weight.numel()
        stored += sum(_bytes(checkpoint.tensor(name)) for name in names)
        used |= names
        tensors[f"{module}.weight"] = weight.contiguous()
    for name in checkpoint.names:
        module = name.rpartition(".")[0]
        if name not in used and f"{module}.weight" not in tensors:
            tensors[name] = checkpoint.tensor(name).float().contiguous()
        elif name not in used:  # such as g_idx: in the file, so it is paid for
            stored += _bytes(checkpoint.tensor(name))
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    if "lm_head.weight" in tensors and config.get("tie_word_embeddings"):
        embeddings = tensors["model.embed_tokens.weight"]
        if torch.equal(tensors["lm_head.weight"], embeddings):
            del tensors["lm_head.weight"]
        else:
            config["tie_word_embeddings"] = False
    write_plain(output, plain, tensors, config)
    every = sum(_bytes(checkpoint.tensor(name)) for name in checkpoint.names)
    return StoredSize(taken, stored, every)


def quantized_folder(output: Path) -> Path:
    """The folder with the checkpoint; a package may put it into a folder below."""
    if (output / "config.json").exists():
        return output
    return next(iter(sorted(output.glob("*/config.json")))).parent


def write_plain(
    output: Path, plain: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """A plain checkpoint with the tokenizer files of another."""
    output.mkdir(parents=True)
    save_file(dict(tensors), output / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**config, "dtype": "float32"}, indent=1)
    (output / "config.json").write_text(text + "\n", encoding="utf-8")
    for path in plain.glob("*token*"):
        shutil.copyfile(path, output / path.name)


def _bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
