"""Memory of scoring at depth beyond the model and its KV caches: the table in docs/measured/depth.md.

    python -m tools.depth_memory 2k 32k

A random model with SmolLM2's vocabulary, one layer of 8 heads and a context of 64k tokens is scored with
itself as the reference, and then on an fp8 cache, in a process of its own for each depth. "Rest" is the peak
of the resident size since the model was loaded, less the reference's parameters and the KV caches that the
tokens fill.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

BLOCK, SPARE_BLOCKS = 16, 64


def save_model(folder: Path) -> None:
    import torch
    from llmopt.recipes import MODELS
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        vocab_size=49152,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODELS / "stories3M", trust_remote_code=False).save_pretrained(
        folder
    )


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def measure(folder: Path, depth: str) -> dict[str, Any]:
    """Megabytes of one depth, by phase: peak since loading, the reference, the KV caches, and the rest."""
    from llmopt.base.memory import peak_memory_bytes, restart_peak_memory
    from llmopt.base.progress import Silent
    from llmopt.bench.options.options import BenchOptions
    from llmopt.bench.session import quality
    from llmopt.engine.cache.kv_cache import kv_block_bytes
    from llmopt.engine.core.engine import Engine

    options = BenchOptions(
        model=str(folder),
        reference=str(folder),
        quality_depth=depth,
        quality_documents=1,
        quality_kv="fp8",
        needles=False,
        num_threads=1,
    )
    (length,) = options.quality_depth
    num_blocks = length // BLOCK + SPARE_BLOCKS
    engine = Engine(replace(options.engine, model=folder, num_blocks=num_blocks, block_size=BLOCK))
    passage = quality.quality_passage(options, engine.tokenizer, 256)
    layouts, kv_dtype = engine.runner.decoder.kv_layouts, engine.runner.cache.dtype
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def filled(*dtypes: Any) -> int:
        return sum(kv_block_bytes(layouts, dtype, BLOCK) for dtype in dtypes) * length // BLOCK

    loaded, phases = resident_bytes(), {}
    score_caches = quality.kv_parts

    def marked(*args: Any) -> dict[str, Any]:
        phases["weights"] = (peak_memory_bytes() - loaded, weights, filled(kv_dtype, kv_dtype))
        restart_peak_memory()
        return score_caches(*args)

    quality.kv_parts = marked
    quality._cache_rounding = lambda *_: None
    restart_peak_memory()
    quality.score_quality(options, engine, passage, Silent())
    import torch

    caches = filled(kv_dtype, torch.float8_e4m3fn, engine.dtype)
    phases["fp8 KV cache"] = (peak_memory_bytes() - loaded, 0, caches)
    return {
        name: [
            round(x / 1e6) for x in (peak, of_reference, of_caches, peak - of_reference - of_caches)
        ]
        for name, (peak, of_reference, of_caches) in phases.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of scoring at depth.")
    parser.add_argument("depths", nargs="+")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        print(json.dumps(measure(arguments.folder, *arguments.depths)))
        return
    print("| depth | scored | peak (MB) | reference (MB) | KV caches (MB) | rest (MB) |")
    print("|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for depth in arguments.depths:
            command = [sys.executable, "-m", "tools.depth_memory", depth, "--folder", folder]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            for name, numbers in json.loads(run.stdout.splitlines()[-1]).items():
                print(f"| {depth} | {name} | " + " | ".join(map(str, numbers)) + " |")


if __name__ == "__main__":
    main()
