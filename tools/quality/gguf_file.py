"""Plain checkpoints of the Llama shape as GGUF files in float32, and quantized files as plain checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from llmopt.quant.model.checkpoint import Checkpoint

from tools.continuous_model import NAMES, unpermuted
from tools.quality.dequantized import StoredSize, write_plain

OTHERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
EMBEDDINGS = ("token_embd.weight", "output.weight")
SIZES = {
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a tensor of a GGUF file."""
    parts = name.split(".")
    kinds = {**NAMES, **OTHERS}
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{kinds[parts[2]]}.weight"
    return f"{kinds[parts[0]]}.weight"


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `unpermuted`."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def heads_of(name: str, config: Mapping[str, Any]) -> int:
    """The heads whose rows a tensor of a GGUF file has permuted; 0 for none."""
    if ".attn_q." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in name else 0


def write_float_gguf(plain: Path, original: Path, output: Path) -> None:
    """A float32 GGUF file of a plain checkpoint; tokenizer and shape keys are an original file's."""
    checkpoint, source = Checkpoint(plain), GGUFReader(original)
    writer = GGUFWriter(output, "llama")
    for key, field in source.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        value = checkpoint.config[SIZES[key]] if key in SIZES else field.contents()
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=inner)
    for tensor in source.tensors:
        values = checkpoint.tensor(checkpoint_name(tensor.name)).float()
        if heads := heads_of(tensor.name, checkpoint.config):
            values = permuted(values, heads)
        writer.add_tensor(tensor.name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantize_gguf(source: Path, output: Path, plain: Path, *, tables: bool = False) -> StoredSize:
    """A plain checkpoint of a GGUF file, by the `gguf` package; the embeddings are the plain model's.

    Args:
        tables: the embeddings are the file's. Else only the linears are compared: a mix stores the
            embeddings in a type of its own.
    """
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    original = Checkpoint(plain)
    tensors = {}
    weights = stored = every = 0
    for tensor in GGUFReader(source).tensors:
        name = checkpoint_name(tensor.name)
        every += int(tensor.n_bytes)
        if tensor.name in EMBEDDINGS and not tables:
            continue
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if heads := heads_of(tensor.name, config):
            values = unpermuted(values, heads)
        if values.ndim == 2 and tensor.name not in EMBEDDINGS:
            weights += values.numel()
            stored += int(tensor.n_bytes)
        tensors[name] = values.contiguous()
    config["tie_word_embeddings"] = "lm_head.weight" not in {*tensors, *original.names}
    for name in original.names:
        tensors.setdefault(name, original.tensor(name).float().contiguous())
    write_plain(output, plain, tensors, config)
    return StoredSize(weights, stored, every)


@torch.no_grad()
def second_moments(plain: Path, tokens: torch.Tensor) -> dict[str, list[float]]:
    """llama.cpp's importance matrix: by linear, the mean square of each input channel over the tokens."""
    from tools.quality.scoring import load

    model = load(plain)
    sums: dict[str, torch.Tensor] = {}
    handles = []
    names = {theirs: ours for ours, theirs in NAMES.items()}
    for module_name, module in model.named_modules():
        kind = ".".join(module_name.split(".")[-2:])
        if isinstance(module, torch.nn.Linear) and kind in names:
            key = f"blk.{module_name.split('.')[2]}.{names[kind]}.weight"

            def add(_: Any, inputs: Any, __: Any, key: str = key) -> None:
                rows = inputs[0].flatten(0, -2).double()
                sums[key] = sums.get(key, 0) + rows.square().sum(0)

            handles.append(module.register_forward_hook(add))
    for sample in tokens:
        model.model(sample[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {key: (value / tokens.numel()).tolist() for key, value in sums.items()}
