"""GPU benchmark of the engine, one record: `python -m tools.gpu_bench --out FILE`.

Every section runs in a process of its own, within its time: one that fails or takes too long loses only
what it had not yet measured. The roofline ceilings (bytes copied and FLOP per second) are measured in each.
The file is written after every section. `--small` takes tiny shapes, `--interpret` has Triton interpret its
kernels on the CPU: together they run it without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = "llmopt-gpu-bench/1"
LINES = "findings.jsonl"
INTERPRETED_FACTOR = 6
"""Triton's interpreter on a slow CPU takes this many times the time limit that a section has on a GPU."""
SELF = (sys.executable, "-m", "tools.gpu_bench")
"""How a section is started in a process of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-bench.json"))
    parser.add_argument("--sections", help="names, with commas between them; all by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes; serves the CPU too")
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter on the CPU")
    parser.add_argument("--commit", help="to note, where this is no clone")
    # One section, in a process of its own, with a folder for checkpoints and results.
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.interpret:
        os.environ |= {"LLMOPT_TRITON": "interpret", "TRITON_INTERPRET": "1"}
    if given.measure:
        name, home = given.measure
        measure(name, Path(home), given.small, given.interpret)
        return
    from .gpu_figures.figure import markdown

    record = run(given)
    print(markdown(record))
    if any(section["ended"] != "whole" for section in record["sections"]):
        sys.exit(1)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Every section that was asked for; returns what the file holds.

    Raises:
        SystemExit: an unknown section.
    """
    from .gpu_figures.sections import SECTIONS

    known = {section.name: section for section in SECTIONS}
    names = given.sections.split(",") if given.sections else list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no section {unknown[0]!r}: choose {', '.join(known)}")
    record: dict[str, Any] = {"schema": SCHEMA, "date": datetime.now(UTC).date().isoformat()}
    record |= {"commit": given.commit, "small": given.small, "environment": {}, "sections": []}
    spare = 0.0
    for name in names:
        limit = known[name].seconds * (INTERPRETED_FACTOR if given.interpret else 1) + spare
        section, environment = in_a_process(name, limit, given)
        spare = max(0.0, limit - section["seconds"])
        record["environment"] = record["environment"] or environment
        record["commit"] = record["commit"] or environment.get("commit")
        record["sections"].append(section)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        part = given.out.with_name(given.out.name + ".part")
        part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        part.replace(given.out)
        print(f"{name}: {section['ended']} in {section['seconds']:.0f} s", file=sys.stderr)
    return record


def in_a_process(
    name: str, limit: float, given: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of a section, and the environment that it ran in."""
    with tempfile.TemporaryDirectory(dir=roomy()) as home:
        lines = Path(home) / LINES
        words = [*SELF, "--measure", name, home]
        words += [f"--{flag}" for flag in ("small", "interpret") if getattr(given, flag)]
        begin = time.perf_counter()
        try:
            code = subprocess.run(words, timeout=limit, stdout=sys.stderr).returncode
            ended = "whole" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {limit:.0f} s"
        seconds = time.perf_counter() - begin
        found = (
            [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        )
    section = {"name": name, "ended": ended, "seconds": round(seconds, 1)}
    section["roofs"] = next((line["roofs"] for line in found if "roofs" in line), None)
    section["left_out"] = [line["left_out"] for line in found if "left_out" in line]
    section["figures"] = [line["figure"] for line in found if "figure" in line]
    return section, next((line["environment"] for line in found if "environment" in line), {})


def measure(name: str, home: Path, small: bool, interpret: bool) -> None:
    """Measure a section here; every result is a line of JSON in `home` as soon as it is known."""
    import torch
    from llmopt.bench.machine.environment import describe
    from llmopt.engine.doctor.kernel_table import table

    from .gpu_figures.sections import SECTIONS, World
    from .gpu_figures.shapes import FULL, SMALL

    has_gpu = torch.cuda.is_available() and not interpret
    if not has_gpu and not small:
        sys.exit("torch sees no CUDA device: --small takes shapes that a CPU can serve")
    device = "cuda" if has_gpu else "cpu"
    section = next(section for section in SECTIONS if section.name == name)
    with (home / LINES).open("w") as file:

        def say(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        choices = table(torch.device(device), torch.bfloat16)
        kernels = {f"{one.operation}, {one.kernel_query}": one.chosen for one in choices}
        say(environment=describe(device) | {"kernels": kernels})
        world = World(device, SMALL if small else FULL, home)
        rates = {"copy_bytes_per_second": world.copy_bandwidth, "matrix_flops": world.matrix_flops}
        say(roofs=rates)
        for figure in section.measure(world):
            say(figure=asdict(figure))
        for reason in world.left_out:
            say(left_out=reason)


def roomy() -> str | None:
    """Folder for checkpoints: in memory where there is enough of it, else the temporary folder."""
    shared, needed = Path("/dev/shm"), 40 * 2**30
    if not shared.is_dir():
        return None
    found = os.statvfs(shared)
    return str(shared) if found.f_bavail * found.f_frsize > needed else None


if __name__ == "__main__":
    main()
