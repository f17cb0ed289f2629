"""Memory of a run on a CPU, by weight format: `python -m tools.run_memory MODEL --folder DIR`.

Quantizes a model into each format that its widths fit (data-free where the method is; what DIR has is kept),
and runs 16 prompts in a process of its own. Each line holds the peak of the process (`ru_maxrss`) against

    1.15 x files + KV cache + CONSTANT

where CONSTANT is what Python, torch and the tokenizer take before a model is opened, plus what a step and
the packing of the largest matrix take at once; and what is resident after the start against the weights and
400 MB: pages of the KV cache are committed as they are first written. Ends with 0 where every format keeps to
both, else with 1.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.load_speed import resident_bytes

FACTOR = 1.15
CONSTANT = 448 * 2**20
AT_START = 400 * 10**6
"""Resident after a start, beside the weights."""
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 4
KV_BYTES = 2**28

CALIBRATED = "--num-samples 8 --seq-len 128"
"""Options of methods that are not data-free."""
FORMATS: dict[str, str] = {
    "bf16": "",
    "gptq-4": "--method rtn --format gptq --bits 4 --group-size 64",
    "gptq-3": "--method rtn --format gptq --bits 3 --group-size 64",
    "gptq-8": "--method rtn --format gptq --bits 8 --group-size 64",
    "awq-4": "--method rtn --format awq --bits 4 --group-size 64",
    "ct-int4": "--method rtn --format compressed-tensors --bits 4 --group-size 32",
    "ct-int8": "--method rtn --format compressed-tensors --bits 8 --group-size -1",
    "ct-fp8": "--method fp8 --format compressed-tensors --granularity channel",
    "fp8-block": "--method fp8 --format fp8 --granularity block",
    "nvfp4": "--method nvfp4",
    "mxfp4": "--method mxfp4",
    "bnb-nf4": "--method nf4",
    "bnb-fp4": "--method fp4",
    "bnb-int8": "--method int8",
    "squeezellm-3": f"--method squeezellm --bits 3 {CALIBRATED}",
    "exl3-3": f"--method trellis --bits 3 {CALIBRATED}",
    "quip-3": f"--method quip --bits 3 {CALIBRATED}",
    **{
        f"gguf-{name}": f"--method rtn --format gguf --gguf-type {name}"
        for name in (
            *("Q2_K", "Q3_K_M", "Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_M", "Q6_K"),
            *("Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS"),
        )
    },
}


def make(model: Path, folder: Path, options: str) -> Path:
    """The model in a format, as files."""
    if not options:
        return model
    if not folder.exists():
        command = [sys.executable, "-m", "llmopt.cli.main", "quantize", "--model", str(model)]
        data = () if CALIBRATED in options else ("--no-errors",)
        command += [*options.split(), *data, "--output", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def run(folder: Path, threads: int) -> dict[str, Any]:
    """Run a batch, and say what it took."""
    from llmopt.engine.base.sampling_params import SamplingParams
    from llmopt.engine.config.config import EngineConfig
    from llmopt.engine.engine import Engine

    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")]
    config = EngineConfig(
        folder,
        device="cpu",
        dtype="bfloat16",
        num_threads=threads,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS + 1,
        max_num_seqs=SEQUENCES,
        kv_cache_memory_bytes=KV_BYTES,
    )
    engine = Engine(config)
    started = resident_bytes()
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index in range(SEQUENCES):
        engine.add_request(str(index), [3 + index] * PROMPT_TOKENS, params)
    while engine.has_unfinished():
        engine.step()
    return {
        "file_bytes": sum(path.stat().st_size for path in files),
        "weight_bytes": engine.memory.weight_bytes,
        "kv_cache_bytes": engine.memory.kv_cache_bytes,
        "started_bytes": started,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def bound(found: dict[str, Any]) -> int:
    """The most bytes that a run may take."""
    return int(FACTOR * found["file_bytes"]) + found["kv_cache_bytes"] + CONSTANT


def holds(found: dict[str, Any]) -> bool:
    """Whether the process, at its start and its peak, and its weights keep to their bounds."""
    held = found["weight_bytes"] <= FACTOR * found["file_bytes"]
    started = found["started_bytes"] <= found["weight_bytes"] + AT_START
    return held and started and found["peak_bytes"] <= bound(found)


def show(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| format | files | weights held | held / files | KV cache | started | peak | bound | holds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["weight_bytes"] / row["file_bytes"]
        parts = (row["kv_cache_bytes"], row["started_bytes"], row["peak_bytes"], bound(row))
        sizes = " | ".join(f"{size / 2**20:,.0f} MiB" for size in parts)
        files, held = (row[name] / 2**20 for name in ("file_bytes", "weight_bytes"))
        lines.append(
            f"| {row['format']} | {files:,.1f} MiB | {held:,.1f} MiB | {ratio:.3f} | {sizes} "
            f"| {'yes' if holds(row) else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, help="where the formats are written and kept")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="a run of MODEL as it is, as JSON")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.model, given.threads)))
        return 0
    names = given.formats.split(",")
    unknown = [name for name in names if name not in FORMATS]
    if unknown or given.folder is None:
        parser.error(f"no format {', '.join(unknown)}" if unknown else "--folder is missing")
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        try:
            files = make(given.model, given.folder / name, FORMATS[name])
        except subprocess.CalledProcessError:  # quantize has said why
            print(f"{name} is left out", flush=True)
            continue
        command = [sys.executable, "-m", "tools.run_memory", str(files), "--one"]
        command += ["--threads", str(given.threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append({"format": name} | json.loads(done.stdout.splitlines()[-1]))
        print(show(rows).splitlines()[-1], flush=True)
        if given.output:
            record: dict[str, Any] = {
                "factor": FACTOR,
                "constant_bytes": CONSTANT,
                "model": given.model.name,
            }
            record["rows"] = rows
            given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nCONSTANT: {CONSTANT / 2**20:.0f} MiB\n\n{show(rows)}")
    return 0 if all(map(holds, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
