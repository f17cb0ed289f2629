"""The real model with its linears off the 4-bit grid that they come from, and its exact 768-wide twin.

    python tools/continuous_model.py build/real      # prints the two folders

SmolLM2-135M-Instruct's linears come from a Q4_1 GGUF: 16 values per block of 32, which asymmetric codes can
hit exactly and which flatters them. Seeded uniform noise of ± half a block's step spreads them evenly; that
model is then the reference, in bfloat16, so that every package reads the same values whatever it computes in.
The twin serves formats with blocks of 128 or 256: zero channels and heads from 576 to 768, norm weights
x sqrt(576/768), eps x 576/768, in float32 because those norm weights are no bfloat16 values. The tool ends
with 1 where the logits of the two differ by more than float32's rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.real_model import fetch_gguf, plain_checkpoint

CONTINUOUS, TWIN = "SmolLM2-continuous", "SmolLM2-continuous-768"
TWIN_WIDTH = 768
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LINEAR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
TOLERANCE = 1e-3
"""Of the largest difference between the logits, which reach about 30; float32 sums in another order."""


def block_steps(
    gguf: Path, config: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By the checkpoint's tensor name: step `[out, in / 32]` and value `[out, in]` of each Q4_1 linear."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    linears = {}
    for tensor in GGUFReader(gguf).tensors:
        match = LINEAR.fullmatch(tensor.name)
        if match is None or tensor.tensor_type != GGMLQuantizationType.Q4_1:
            continue
        layer, kind = match.groups()
        rows = tensor.data.shape[0]
        # A block is d and m in float16, and 32 codes in 16 bytes.
        steps = tensor.data.reshape(rows, -1, 20)[:, :, :2].copy().view("<f2")[:, :, 0]
        parts = [
            torch.from_numpy(part).float()
            for part in (steps, dequantize(tensor.data, tensor.tensor_type))
        ]
        if kind in heads:
            parts = [unpermuted(part, heads[kind]) for part in parts]
        linears[f"model.layers.{layer}.{NAMES[kind]}.weight"] = (parts[0], parts[1])
    return linears


def unpermuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads * head_dim, n]` from GGUF's interleaved RoPE halves to the checkpoint's halves."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def add_noise(
    tensors: dict[str, torch.Tensor],
    linears: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    seed: int,
) -> None:
    """Move each linear by uniform noise of ± half its block's step.

    Raises:
        ValueError: the file's values are not the checkpoint's, so that the steps would be misplaced.
    """
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(linears):
        steps, values = linears[name]
        if not torch.equal(values.to(tensors[name].dtype), tensors[name]):
            raise ValueError(f"{name} of the GGUF file is not that of the checkpoint")
        noise = torch.rand(values.shape, generator=generator) - 0.5
        moved = values + noise * steps.repeat_interleave(32, dim=1)
        tensors[name] = moved.to(tensors[name].dtype)


def widened(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], width: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same function with `width` channels, in float32: zero channels and whole groups of heads.

    RMSNorm divides by the mean over all channels, which zeros lower by hidden_size / width.
    """
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    more_heads, more_kv_heads = width // head_dim, width // head_dim * kv_heads // heads
    share = hidden / width
    queries, keys = (more_heads * head_dim, width), (more_kv_heads * head_dim, width)
    shapes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": (width, queries[0])}
    wide = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            out = torch.zeros(width)
            out[:hidden] = tensor.float() * math.sqrt(share)
        else:
            kind = name.split(".")[-2]
            same = tuple(width if size == hidden else size for size in tensor.shape)
            out = torch.zeros(shapes.get(kind, same))
            out[: tensor.shape[0], : tensor.shape[1]] = tensor
        wide[name] = out
    changed = {
        "hidden_size": width,
        "num_attention_heads": more_heads,
        "num_key_value_heads": more_kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] * share,
        "dtype": "float32",
    }
    return wide, {**config, **changed}


def write(
    folder: Path, plain: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """A checkpoint under a temporary name first; the tokenizer's files are the plain checkpoint's."""
    part = folder.with_name(folder.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    save_file(dict(tensors), part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in plain.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copyfile(path, part / path.name)
    part.replace(folder)


@torch.no_grad()
def logit_difference(folder: Path, other: Path) -> float:
    """The largest difference between two models' logits, in float32, on fixed tokens."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 49152, (1, 64), generator=torch.Generator().manual_seed(1))
    logits = [
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32, trust_remote_code=False)(
            tokens
        ).logits
        for each in (folder, other)
    ]
    return float((logits[0] - logits[1]).abs().max())


def make(folder: Path, seed: int) -> tuple[Path, Path]:
    """The two checkpoints in `folder`; one that is there is used as it is."""
    continuous, twin = folder / CONTINUOUS, folder / TWIN
    plain = plain_checkpoint(folder)
    if not continuous.is_dir():
        config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(plain / "model.safetensors")
        add_noise(tensors, block_steps(fetch_gguf(folder), config), seed)
        write(continuous, plain, tensors, config)
    if not twin.is_dir():
        config = json.loads((continuous / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(continuous / "model.safetensors")
        write(twin, continuous, *widened(tensors, config, TWIN_WIDTH))
    return continuous, twin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    given = parser.parse_args()
    continuous, twin = make(given.folder, given.seed)
    print(continuous)
    print(twin)
    difference = logit_difference(continuous, twin)
    met = difference <= TOLERANCE
    print(
        f"largest difference of their logits: {difference:.1e}, {'exact' if met else 'NOT exact'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
