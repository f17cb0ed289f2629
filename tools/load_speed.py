"""Load time of checkpoints against raw read time, and memory after it: `tools/load_speed.py CHECKPOINT ...`.

Rounds over the checkpoints, each in a process of its own. Before a file is read or loaded it is dropped
from the page cache, so that both come from the disk. Reading is the file in pieces of 16 MiB; loading is
from the opened checkpoint to weights as the kernels read them. What the libraries take is what the process
holds before that; the peak is after a batch of prompts and some tokens of each, and is compared with their
sum. The first token is that of an engine opened on the dropped file with a prompt of 16 tokens, after the
libraries were imported; what importing takes stands beside it, with the number of modules.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 256, 16
FIRST_TOKENS = 16


def drop(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> int:
    buffer, total = bytearray(2**24), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(folder: Path, threads: int) -> dict[str, Any]:
    """One round of one checkpoint."""
    begin = time.process_time()
    import llmopt.engine  # noqa: F401  (before torch, as the command line does: it bounds OpenMP's spins)
    import torch
    from llmopt.engine.base.sampling_params import SamplingParams
    from llmopt.engine.config.config import EngineConfig
    from llmopt.engine.engine import Engine
    from llmopt.engine.execution.workers import open_shards
    from llmopt.quant.load_processor import load_tokenizer
    from llmopt.quant.open import open_checkpoint

    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
    config = EngineConfig(
        folder,
        device="cpu",
        dtype="bfloat16",
        num_threads=threads,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS + 1,
        max_num_seqs=BATCH,
        kv_cache_memory_bytes=2**28,
    )
    importing = time.process_time() - begin
    torch.set_num_threads(threads)
    load_tokenizer(folder)
    libraries = resident_bytes()
    drop(files)
    begin = time.perf_counter()
    total = read(files)
    reading = time.perf_counter() - begin
    drop(files)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    checkpoint.read_ahead()
    model = open_shards(config, checkpoint, torch.device("cpu"), torch.bfloat16)
    loading = time.perf_counter() - begin
    del model, checkpoint
    drop(files)
    begin = time.perf_counter()
    engine = Engine(config)
    engine.add_request("first", [3] * FIRST_TOKENS, SamplingParams(temperature=0.0, max_tokens=1))
    while engine.has_unfinished():
        engine.step()
    first_token = time.perf_counter() - begin
    modules = len(sys.modules)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index in range(BATCH):
        engine.add_request(str(index), [3 + index] * PROMPT_TOKENS, params)
    while engine.has_unfinished():
        engine.step()
    memory = engine.memory
    return {
        "checkpoint": folder.name,
        "file_bytes": total,
        "read_seconds": reading,
        "load_seconds": loading,
        "first_token_seconds": first_token,
        "import_cpu_seconds": importing,
        "modules": modules,
        "library_bytes": libraries,
        "weight_bytes": memory.weight_bytes,
        "kv_cache_bytes": memory.kv_cache_bytes,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def show(found: list[dict[str, Any]]) -> str:
    lines = [
        "| checkpoint | file | read, s | load, s | load / read | first token, s | first token / read "
        "| imports, CPU s | modules | libraries | weights | KV cache | peak | over |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one["checkpoint"] for one in found):
        own = [one for one in found if one["checkpoint"] == name]
        ratios = [one["load_seconds"] / one["read_seconds"] for one in own]
        parts = ("library_bytes", "weight_bytes", "kv_cache_bytes")
        peak = max(one["peak_bytes"] for one in own)
        over = peak / sum(own[0][part] for part in parts) - 1
        sizes = [own[0][part] for part in parts] + [peak]
        shown = " | ".join(f"{size / 2**20:,.0f} MiB" for size in sizes)
        lines.append(
            f"| {name} | {own[0]['file_bytes'] / 1e9:.2f} GB "
            f"| {statistics.median(one['read_seconds'] for one in own):.2f} "
            f"| {statistics.median(one['load_seconds'] for one in own):.2f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {statistics.median(one['first_token_seconds'] for one in own):.2f} "
            f"| {statistics.median(one['first_token_seconds'] / one['read_seconds'] for one in own):.2f} "
            f"| {statistics.median(one['import_cpu_seconds'] for one in own):.2f} | {own[0]['modules']:,} "
            f"| {shown} | {over:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="a single round, as JSON")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.checkpoints[0], given.threads)))
        return
    found = []
    for _ in range(given.rounds):
        for folder in given.checkpoints:
            command = [sys.executable, __file__, str(folder), "--one"]
            command += ["--threads", str(given.threads)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    print(show(found))
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
