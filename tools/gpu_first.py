"""First contact with a GPU, in ten minutes: `python -m tools.gpu_first --out FILE`.

Every kernel against its reference, graphs against eager steps, a search of tiles, an 8B model with a
profile, and a second card where there is one. Each stage runs in a process of its own, within its time: one
that fails loses only what it had not yet found. One JSON file, and beside it one page that says which
expectation failed.
`--small` takes tiny shapes, `--interpret` has Triton interpret its kernels on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .gpu_bench import INTERPRETED_FACTOR, LINES, roomy

SCHEMA = "llmopt-gpu-first/1"
SELF = (sys.executable, "-m", "tools.gpu_first")
"""How a stage is started in a process of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-first.json"))
    parser.add_argument("--stages", help="names, with commas between them; all by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes; serves the CPU too")
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter on the CPU")
    parser.add_argument("--commit", help="to note, where this is no clone")
    # One stage, in a process of its own, with a folder for checkpoints and results.
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.interpret:
        os.environ |= {"LLMOPT_TRITON": "interpret", "TRITON_INTERPRET": "1"}
    if given.run:
        name, home = given.run
        run_stage(name, Path(home), given.small, given.interpret)
        return
    record = run(given)
    if failures(record):
        sys.exit(1)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Every stage that was asked for, written after each; returns what the file holds.

    Raises:
        SystemExit: an unknown stage.
    """
    from .gpu_contact.expectation import page
    from .gpu_contact.stages import STAGES

    known = {stage.name: stage for stage in STAGES}
    names = given.stages.split(",") if given.stages else list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no stage {unknown[0]!r}: choose {', '.join(known)}")
    record: dict[str, Any] = {"schema": SCHEMA, "date": datetime.now(UTC).date().isoformat()}
    record |= {"commit": given.commit, "small": given.small, "environment": {}, "stages": []}
    spare = 0.0
    for name in names:
        limit = known[name].seconds * (INTERPRETED_FACTOR if given.interpret else 1) + spare
        stage, environment = in_a_process(name, limit, given)
        spare = max(0.0, limit - stage["seconds"])
        record["environment"] = record["environment"] or environment
        record["commit"] = record["commit"] or environment.get("commit")
        record["stages"].append(stage)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        _write(given.out, json.dumps(record, indent=1) + "\n")
        _write(given.out.with_suffix(".md"), page(record))
        failed = sum(each["met"] is False for each in stage["expectations"])
        told = f"{name}: {stage['ended']} in {stage['seconds']:.0f} s, {failed} expectations fail"
        print(told, file=sys.stderr)
    print(f"{given.out}, {given.out.with_suffix('.md')}: {failures(record)} failures")
    return record


def failures(record: Mapping[str, Any]) -> int:
    """Expectations that fail, and stages that did not end."""
    return sum(
        (stage["ended"] != "whole") + sum(each["met"] is False for each in stage["expectations"])
        for stage in record["stages"]
    )


def in_a_process(
    name: str, limit: float, given: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Findings of a stage, and the environment that it ran in."""
    with tempfile.TemporaryDirectory(dir=roomy()) as home:
        lines = Path(home) / LINES
        words = [*SELF, "--run", name, home]
        words += [f"--{flag}" for flag in ("small", "interpret") if getattr(given, flag)]
        begin = time.perf_counter()
        try:
            code = subprocess.run(words, timeout=limit, stdout=sys.stderr).returncode
            ended = "whole" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {limit:.0f} s"
        seconds = round(time.perf_counter() - begin, 1)
        text = lines.read_text() if lines.exists() else ""
    found = [json.loads(line) for line in text.splitlines()]
    stage = {"name": name, "ended": ended, "seconds": seconds}
    stage["expectations"] = [line["expectation"] for line in found if "expectation" in line]
    stage["facts"] = [line["facts"] for line in found if "facts" in line]
    return stage, next((line["environment"] for line in found if "environment" in line), {})


def run_stage(name: str, home: Path, small: bool, interpret: bool) -> None:
    """Run a stage here; every finding is a line of JSON in `home` as soon as it is known."""
    import torch
    from llmopt.bench.machine.environment import describe

    from .gpu_contact.expectation import Expectation
    from .gpu_contact.stages import STAGES
    from .gpu_figures.sections import World
    from .gpu_figures.shapes import FULL, SMALL

    has_gpu = torch.cuda.is_available() and not interpret
    if not has_gpu and not small:
        sys.exit("torch sees no CUDA device: --small takes shapes that a CPU can serve")
    device = "cuda" if has_gpu else "cpu"
    stage = next(stage for stage in STAGES if stage.name == name)
    with (home / LINES).open("w") as file:

        def say(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        named = torch.cuda.get_device_name() if has_gpu else "CPU"
        say(environment=describe(device) | {"device": named})
        for finding in stage.run(World(device, SMALL if small else FULL, home)):
            kind = "expectation" if isinstance(finding, Expectation) else "facts"
            say(**{kind: asdict(finding)})


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
