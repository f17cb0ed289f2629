"""The checkpoints that tools/quantizer_speed.py has quantized: random Llamas, and a model's first layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.models import resolve_model
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "heads": 8},
    "0.13B": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "heads": 12},
    "1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "heads": 32,
        "kv_heads": 4,
    },
}


def make_model(shape: str, folder: Path, layers: int | None = None) -> None:
    """A random Llama in bfloat16, with the bundled tokenizer, whose ids are the first of the vocabulary."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    sizes["num_hidden_layers"] = min(
        layers or sizes["num_hidden_layers"], sizes["num_hidden_layers"]
    )
    config = transformers.LlamaConfig(
        vocab_size=32000,
        num_attention_heads=heads,
        num_key_value_heads=sizes.pop("kv_heads", heads),
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
        **sizes,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    bundled = resolve_model("stories3M")
    for path in bundled.glob("*token*"):
        shutil.copy(path, folder)


def first_layers(model: Path, folder: Path, layers: int) -> None:
    """A checkpoint of a Llama's first layers, with everything around them."""
    folder.mkdir()
    for path in model.iterdir():
        if path.is_file() and not path.name.startswith("model"):
            shutil.copy(path, folder)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layers = min(layers, config["num_hidden_layers"])
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    checkpoint = Checkpoint(model)
    kept = {
        name: checkpoint.tensor(name).clone()
        for name in checkpoint.names
        if not (name.startswith("model.layers.") and int(name.split(".")[2]) >= layers)
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
