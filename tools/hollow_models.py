"""Checkpoints of any size on a small disk: the weights behind the first layer are holes in their files.

    python -m tools.hollow_models 671B FOLDER

writes the first layer and the embedding with random values, and the headers of everything else.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from llmopt.recipes import MODELS
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def _llama(hidden: int, width: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype="bfloat16",
    )


REAL = {
    "8B": _llama(4096, 14336, 32, 32),
    "70B": _llama(8192, 28672, 80, 64),
    "671B": DeepseekV3Config(dtype="bfloat16"),
}
"""Llama 3.1 8B and 70B, and DeepSeek-V3 in bfloat16."""


def shapes_of(config: Any) -> Shapes:
    """The tensors of a checkpoint, each expert's its own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    shapes: Shapes = {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            shapes[name] = tensor.dtype, tuple(tensor.shape)
            continue
        names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        experts, rows, columns = tensor.shape
        for expert in range(experts):
            for each in names:
                shape = rows // len(names), columns
                shapes[f"{stem}.{expert}.{each}.weight"] = tensor.dtype, shape
    return shapes


def write(folder: Path, config: Any, *, random: bool = True) -> int:
    """Write a checkpoint with a shard a layer, of which the first is random or a hole too; its bytes."""
    folder.mkdir(parents=True)
    config.architectures = [
        "LlamaForCausalLM" if config.model_type == "llama" else "DeepseekV3ForCausalLM"
    ]
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODELS / "stories260K" / name).read_bytes())
    shards: dict[str, Shapes] = defaultdict(dict)
    for name, entry in shapes_of(config).items():
        layer = _LAYER.match(name)
        is_first = name.startswith("model.embed_tokens.") or (layer and layer[1] == "0")
        number = layer[1] if layer else "last"
        shards["first" if is_first else number][name] = entry
    homes: dict[str, str] = {}
    size = 0
    for shard, shapes in shards.items():
        path = folder / f"{shard}.safetensors"
        homes |= dict.fromkeys(shapes, path.name)
        if shard == "first" and random:
            save_file({name: _random(*entry) for name, entry in shapes.items()}, path)
        else:
            _write_hole(path, shapes)
        size += path.stat().st_size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return size


def _random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(std=0.02)


def _write_hole(path: Path, shapes: Shapes) -> None:
    """A safetensors file with its header alone."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entry = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    print(write(Path(sys.argv[2]), REAL[sys.argv[1]]))
