"""GPU benchmark of the engine, one record: `python -m tools.gpu_bench --out FILE`.

Every section runs in a process of its own, within its time: one that fails or takes too long loses only
what it had not yet measured. The roofline ceilings (bytes copied and FLOP per second) are measured in each.
The file is written after every section. `--small` takes tiny shapes, `--interpret` has Triton interpret its
kernels on the CPU: together they run it without a GPU."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .gpu.parts import WHOLE, Finding, Parts, device_of, findings, parse, write_json

COMMAND = (sys.executable, "-m", "tools.gpu_bench", "--run")


def main() -> None:
    given = parse((__doc__ or "").splitlines()[0], "section", Path("runs/gpu-bench.json"))
    if given.run:
        name, home = given.run
        measure(name, Path(home), given)
        return
    from .gpu.figure import markdown

    record = sections().run(given)
    print(markdown(record))
    if any(section["ended"] != WHOLE for section in record["sections"]):
        sys.exit(1)


def sections() -> Parts:
    """The sections of the record."""
    from .gpu.sections import SECTIONS

    seconds = {section.name: section.seconds for section in SECTIONS}
    return Parts("llmopt-gpu-bench/1", "section", seconds, COMMAND, _collected, write_json)


def _collected(found: list[Finding]) -> dict[str, Any]:
    return {
        "roofs": next((line["roofs"] for line in found if "roofs" in line), None),
        "left_out": [line["left_out"] for line in found if "left_out" in line],
        "figures": [line["figure"] for line in found if "figure" in line],
    }


def measure(name: str, home: Path, given: argparse.Namespace) -> None:
    """Measure a section here."""
    import torch
    from llmopt.bench.machine.environment import describe
    from llmopt.engine.doctor.kernel_table import table

    from .gpu.sections import SECTIONS, World
    from .gpu.shapes import FULL, SMALL

    section = next(section for section in SECTIONS if section.name == name)
    with findings(home) as say:
        device = device_of(given.small, given.interpret)
        choices = table(torch.device(device), torch.bfloat16)
        kernels = {f"{one.operation}, {one.kernel_query}": one.chosen for one in choices}
        say(environment=describe(device) | {"kernels": kernels})
        world = World(device, SMALL if given.small else FULL, home)
        rates = {"copy_bytes_per_second": world.copy_bandwidth, "matrix_flops": world.matrix_flops}
        say(roofs=rates)
        for figure in section.measure(world):
            say(figure=asdict(figure))
        for reason in world.left_out:
            say(left_out=reason)


if __name__ == "__main__":
    main()
