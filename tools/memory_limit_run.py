"""Quantize a checkpoint several times larger than the memory limit of the process (RLIMIT_DATA).

    python tools/memory_limit_run.py --method gptq --hidden 512 --layers 270
    python tools/memory_limit_run.py --method autoround --options "--iters 2 --group-size 64"
    python tools/memory_limit_run.py --method rtn --options "--rotate R1,R2"

Makes a random Llama-shaped checkpoint, then runs `llmopt quantize` on it in a process whose private memory
the kernel limits (RLIMIT_DATA, which needs no privileges: an allocation beyond it fails). The limit is a
third of the checkpoint or less. Prints the peak that was predicted beside the peak that was measured, both
without what the process has in use before it begins, and fails where the peak is more than a fifth above the
prediction; one that is as far below it is said, too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from llmopt.quant.base.atomic_io import layout_of, write_tensors
from llmopt.recipes import MODELS

MIB = 2**20
LAYERS_IN_A_SHARD = 1
TOLERANCE = 0.2


def main() -> int:
    """0: it went through under the limit and the prediction held."""
    options = _arguments()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        size = make_checkpoint(work / "model", options.hidden, options.layers)
        limit = options.limit_mib * MIB if options.limit_mib else size // 3
        print(f"checkpoint {size / MIB:.0f} MiB, memory limit {limit / MIB:.0f} MiB", flush=True)
        done = subprocess.run(
            [
                *(sys.executable, "-c", "from llmopt.cli.main import main; main()", "quantize"),
                *(str(work / "model"), "--method", options.method, "-o", str(work / "out")),
                *("--num-samples", str(options.samples), "--seq-len", "128", "--json"),
                *shlex.split(options.options),
            ],
            stdout=subprocess.PIPE,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
        if done.returncode:
            print(f"the run ended with {done.returncode}")
            return 1
        result = json.loads(done.stdout)
    predicted, measured = result["preflight"]["memory"]["bytes"], result["peak_bytes"]
    run = f"{options.method} {options.options}".strip()
    print(f"{run}: {result['seconds']:.0f} s under a limit of {limit / MIB:.0f} MiB")
    for part, bytes_ in result["preflight"]["memory"].items():
        print(f"  {part:12s} {bytes_ / MIB:8.1f} MiB predicted")
    print(f"peak {measured / MIB:.1f} MiB, {measured / predicted:.3f} of the prediction")
    if measured < (1 - TOLERANCE) * predicted:
        print(f"more than {TOLERANCE:.0%} below the prediction")
    return 0 if measured <= (1 + TOLERANCE) * predicted else 1


def make_checkpoint(folder: Path, hidden: int, layers: int) -> int:
    """Write a random checkpoint with the bundled tokenizer; bytes of its weights."""
    folder.mkdir()
    source = MODELS / "stories3M"
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    inner = hidden * 11 // 4 // 128 * 128
    config = json.loads((source / "config.json").read_text()) | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        return weight.to(torch.bfloat16)

    weight_map: dict[str, str] = {}
    total = 0

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        write_tensors(folder / name, tensors, layout_of(tensors))
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    vocab = int(config["vocab_size"])
    write(
        "model-other.safetensors",
        {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": ones.clone()},
    )
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for first in range(0, layers, LAYERS_IN_A_SHARD):
        tensors = {}
        for index in range(first, min(first + LAYERS_IN_A_SHARD, layers)):
            for name, shape in shapes.items():
                tensors[f"model.layers.{index}.{name}.weight"] = matrix(*shape)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{index}.{norm}.weight"] = ones.clone()
        write(f"model-{first:05d}.safetensors", tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--options", default="", help="further options of llmopt quantize")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=270)
    parser.add_argument(
        "--limit-mib", type=int, default=0, help="default: a third of the checkpoint"
    )
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--folder", default=None, help="where to work; default: the temporary folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
