"""First contact with a GPU, in ten minutes: `python -m tools.gpu_first --out FILE`.

Every kernel against its reference, graphs against eager steps, a search of tiles, an 8B model with a
profile, and a second card where there is one. Each stage runs in a process of its own, within its time: one
that fails loses only what it had not yet found. One JSON file, and beside it one page that says which
expectation failed.
`--small` takes tiny shapes, `--interpret` has Triton interpret its kernels on the CPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .gpu.parts import WHOLE, Finding, Parts, device_of, findings, parse, write, write_json

COMMAND = (sys.executable, "-m", "tools.gpu_first", "--run")


def main() -> None:
    given = parse((__doc__ or "").splitlines()[0], "stage", Path("runs/gpu-first.json"))
    if given.run:
        name, home = given.run
        run_stage(name, Path(home), given)
        return
    record = stages().run(given)
    print(f"{given.out}, {given.out.with_suffix('.md')}: {failures(record)} failures")
    if failures(record):
        sys.exit(1)


def stages() -> Parts:
    """The stages of the record."""
    from .gpu.stages import STAGES

    seconds = {stage.name: stage.seconds for stage in STAGES}
    return Parts("llmopt-gpu-first/1", "stage", seconds, COMMAND, _collected, write_with_page)


def _collected(found: list[Finding]) -> dict[str, Any]:
    return {
        "expectations": [line["expectation"] for line in found if "expectation" in line],
        "facts": [line["facts"] for line in found if "facts" in line],
    }


def write_with_page(path: Path, record: dict[str, Any]) -> None:
    """Write the record, and beside it the page."""
    from .gpu.expectation import page

    write_json(path, record)
    write(path.with_suffix(".md"), page(record))


def failures(record: Mapping[str, Any]) -> int:
    """Expectations that fail, and stages that did not end."""
    return sum(
        (stage["ended"] != WHOLE) + sum(each["met"] is False for each in stage["expectations"])
        for stage in record["stages"]
    )


def run_stage(name: str, home: Path, given: argparse.Namespace) -> None:
    """Run a stage here, with a line for each of its findings."""
    ends = time.monotonic() + given.seconds
    with findings(home) as say:
        import torch
        from llmopt.bench.machine.environment import describe

        from .gpu.expectation import Expectation
        from .gpu.sections import World
        from .gpu.shapes import FULL, SMALL
        from .gpu.stages import STAGES

        device = device_of(given.small, given.interpret)
        stage = next(stage for stage in STAGES if stage.name == name)
        named = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        say(environment=describe(device) | {"device": named})
        for finding in stage.run(World(device, SMALL if given.small else FULL, home, ends=ends)):
            kind = "expectation" if isinstance(finding, Expectation) else "facts"
            say(**{kind: asdict(finding)})
            if isinstance(finding, Expectation):
                say(done=finding.what)
                print(f"{name}: {finding.what}: {finding.seen}", file=sys.stderr)


if __name__ == "__main__":
    main()
