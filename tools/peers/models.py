"""Checkpoints of tools/cpu_peers.py with random weights, and the files that quantize makes of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from llmopt.quant.gguf.container import GgufFile, TensorInfo, TensorToWrite, write_gguf
from llmopt.quant.gguf.mix import has_more_bits
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.source.models import resolve_model
from safetensors.torch import save_file

T = TypeVar("T")

SHAPES: dict[str, dict[str, Any]] = {
    # TinyLlama's dimensions.
    "1.1B": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    # OLMoE's dimensions, 8 of 64 experts and 1.1B active parameters, in Qwen3-MoE's architecture.
    "moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
    },
    # Gemma 3 1B's dimensions, its tied head of 262,144 rows included, in Gemma 2's architecture.
    "gemma": {
        "model_type": "gemma2",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 8192,
    },
    # Two layers of Llama 3.2 1B's dimensions, for contexts whose KV cache is read longer than the weights.
    "long": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 40960,
    },
}
LAYERS = 2
"""Made and quantized of a shape, and repeated: of a file with mixed types, the last of them has more bits."""
SMOOTH = ("--method", "smoothquant", "--activations", "dynamic", "--bits", "8")
KINDS: dict[str, tuple[str, ...]] = {
    "w8a8": (*SMOOTH, "--format", "compressed-tensors"),
    "w4a16": ("--method", "rtn", "--symmetric", "--group-size", "128"),
    **{kind: ("--method", "rtn", "--gguf-type", kind) for kind in ("Q4_0", "Q4_K_M", "Q8_0")},
}
"""How each checkpoint is made of the plain one; those with a type of GGUF's own are GGUF files."""
FEW = ("--num-samples", "2", "--held-out", "1", "--seq-len", "32")


def checkpoint(models: Path, shape: str, kind: str) -> Path:
    """A folder or a GGUF file of a shape, made where it is missing; kind "" is the plain checkpoint."""
    made = models / "-".join(filter(None, (shape, kind)))
    is_gguf = kind.startswith("Q")
    if not made.exists():
        few = models / f"{shape}-few-layers"
        if not few.exists():
            part = few.with_name(f"{few.name}.partial")
            shutil.rmtree(part, ignore_errors=True)
            make_few(shape, part)
            part.replace(few)
        if kind:
            quantized = models / f"{made.name}-few-layers"
            if not quantized.exists():
                form = ("--format", "gguf") if is_gguf else ()
                command = [sys.executable, "-m", "llmopt.cli.main", "quantize", str(few)]
                command += [*KINDS[kind], *form, *FEW, "--output", str(quantized)]
                subprocess.run(command, check=True)
            few = quantized
        part = made.with_name(f"{made.name}.partial")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        layers = SHAPES[shape]["num_hidden_layers"]
        if is_gguf:
            repeat_in_gguf(next(few.glob("*.gguf")), part / f"{made.name}.gguf", layers)
        else:
            repeat_in_folder(few, part, layers)
        part.replace(made)
    return next(made.glob("*.gguf")) if is_gguf else made


def make_few(shape: str, folder: Path) -> None:
    """The first layers of a random checkpoint in bfloat16, with the bundled tokenizer."""
    torch.manual_seed(0)
    values = {**SHAPES[shape], "num_hidden_layers": LAYERS}
    config = transformers.AutoConfig.for_model(**values)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, trust_remote_code=False
    )
    model.save_pretrained(folder)
    # transformers writes the number of experts under its own name only.
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**values, **stored}), encoding="utf-8")
    for path in resolve_model("stories3M").glob("*token*"):
        shutil.copy(path, folder)


def repeat_in_gguf(few: Path, made: Path, layers: int) -> None:
    """A GGUF file with all layers, each a copy of the one of `few` with the bits that a mix gives it."""
    file = GgufFile(few)
    tensors = [
        TensorToWrite(name, info.shape, info.type, partial(_bytes, file, info))
        for info, name in _copies(file.tensors, "blk.{}.", layers)
    ]
    count = f"{file.metadata['general.architecture']}.block_count"
    write_gguf(made, {**file.metadata, count: layers}, tensors)


def repeat_in_folder(few: Path, made: Path, layers: int) -> None:
    """Likewise a folder of safetensors."""
    source = Checkpoint(few)
    tensors = {name: source.tensor(name) for name in source.names}
    kept = {name: tensor.clone() for tensor, name in _copies(tensors, "model.layers.{}.", layers)}
    save_file(kept, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((few / "config.json").read_text(encoding="utf-8"))
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for path in few.glob("*token*"):
        shutil.copy(path, made)


def _copies(tensors: Mapping[str, T], prefix: str, layers: int) -> Iterator[tuple[T, str]]:
    """Each tensor under each of its names."""
    for name, tensor in tensors.items():
        if not name.startswith(prefix.partition("{")[0]):
            yield tensor, name
        for layer in range(layers):
            of_few = prefix.format(int(has_more_bits(layer, layers)))
            if name.startswith(of_few):
                yield tensor, name.replace(of_few, prefix.format(layer), 1)


def _bytes(file: GgufFile, info: TensorInfo) -> Iterator[bytes]:
    yield file.bytes_of(info).tobytes()
