"""Plans with weights in RAM next to published llama.cpp set-ups, and their error.

    python -m tools.offload_error            # write the table of docs/measured/offload.md
    python -m tools.offload_error --check    # compare the table with the document
    python -m tools.offload_error --fit      # print the shares of RAM and PCIe that fit best

Errors are also given with the machine left out: its rows are planned with the shares that fit the others.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import Device, find_device
from llmopt.engine.planner.engine_rules import engine_rule
from llmopt.engine.planner.expected import step_model
from llmopt.engine.planner.memory import GIB, Deployment
from llmopt.engine.planner.offload import Host, Offload, Reached, parse_host, placements
from llmopt.engine.planner.plan_request import named_recipe
from llmopt.engine.planner.setup import Setup
from llmopt.engine.planner.step_model import StepModel, StepWork
from llmopt.engine.planner.weights import WeightRecipe
from llmopt.quant.families.shapes import ModelShape

from .document_part import put_part

ENGINE = "llama.cpp"
PAGE = "docs/measured/offload.md"
RAM = [0.02 * step for step in range(20, 51)]
LAYER = [20e-6 * step for step in range(21)]
PCIE = [0.02 * step for step in range(20, 51)]


@dataclass(frozen=True, slots=True)
class SetUp:
    """A published figure: its machine, what runs on it, and tokens/s of `decode` or `prefill`."""

    machine: str
    host: dict[str, Any]
    row: dict[str, Any]
    measure: str
    steps: StepModel

    @property
    def published(self) -> float:
        return self.row[self.measure]

    def planned(self, reached: Reached) -> float:
        """Tokens/s by the plan, on a machine with these shares."""
        offload = self.steps.offload
        assert offload is not None
        offload = replace(offload, host=replace(offload.host, reached=reached))
        steps, row = replace(self.steps, offload=offload), self.row
        if self.measure == "decode":
            return 1 / steps.seconds(StepWork.of(1, row["context"]))
        return row["prompt"] / steps.seconds(StepWork.of(0, 0, row["prompt"]))


def set_ups() -> list[SetUp]:
    """All published figures."""
    file = Path(__file__).with_name("offload_setups.json")
    published = json.loads(file.read_text(encoding="utf-8"))
    figures = []
    for row in published["setups"]:
        host = published["hosts"][row["host"]]
        steps = _steps(host, row)
        measures = [measure for measure in ("decode", "prefill") if measure in row]
        figures += [SetUp(row["host"], host, row, measure, steps) for measure in measures]
    return figures


def _steps(host: dict[str, Any], row: dict[str, Any]) -> StepModel:
    model, weights = find_model(row["model"]), row["weights"]
    recipe = named_recipe(weights, model.shape) if weights else model.as_stored()
    ram = parse_host("9999GB", host["ram"], host["pcie"])
    assert ram is not None
    offload = placed(model.shape, recipe, ram, row.get("batch", 512), _flag(row))
    if "tflops" in host:
        memory, peak = int(host["memory_gib"] * GIB), 1e12 * host["tflops"]
        gpu = Device(host["gpu"], memory, bandwidth=1e9 * host["bandwidth"], peaks={"bf16": peak})
    else:
        gpu = find_device(host["gpu"])
    rule = engine_rule(ENGINE)
    deployment = Deployment(model.shape, recipe, 2, 256, engine=rule, offload=offload)
    return step_model(deployment, gpu, Setup(engine=ENGINE), model.name)


def placed(
    shape: ModelShape, recipe: WeightRecipe, host: Host, batch_tokens: int, flag: str
) -> Offload:
    """The placement of llama.cpp with this flag, such as `--n-cpu-moe 26` or `-ngl 32`."""
    ways = placements(shape, recipe, host, ENGINE, batch_tokens)
    return next(offload for offload in ways if offload.flag.endswith(flag))


def _flag(row: dict[str, Any]) -> str:
    """The option of llama.cpp: layers whose experts are in RAM, or layers that are on the GPU."""
    name, option = ("experts", "--n-cpu-moe") if "experts" in row else ("layers", "-ngl")
    return f"{option} {row[name]}"


def fitted(rows: Sequence[SetUp]) -> Reached:
    """The shares with the least mean error; every machine has the same weight."""

    def error(reached: Reached, measure: str) -> float:
        by_machine: dict[str, list[float]] = {}
        for row in rows:
            if row.measure == measure:
                off = abs(log(row.planned(reached) / row.published))
                by_machine.setdefault(row.machine, []).append(off)
        return fmean(map(fmean, by_machine.values())) if by_machine else 0.0

    pairs = itertools.product(RAM, LAYER)
    ram, layer = min(pairs, key=lambda pair: error(Reached(*pair), "decode"))
    pcie = min(PCIE, key=lambda share: error(Reached(ram, layer, share), "prefill"))
    return Reached(round(ram, 2), round(layer, 6), round(pcie, 2))


def table() -> str:
    """The table with plans by the committed shares, and by those that fit the other machines."""
    rows = set_ups()
    lines = [
        "| machine | model | weights | option | measure | published | plan | error | machine left out |",
        "| --- | --- | --- | --- | --- | --: | --: | --: | --: |",
    ]
    errors: dict[str, list[float]] = {}
    held_out: dict[str, list[float]] = {}
    shares: dict[str, Reached] = {}
    for row in rows:
        plan, others = row.planned(Reached()), [r for r in rows if r.machine != row.machine]
        errors.setdefault(row.measure, []).append(plan / row.published)
        left_out = "-"
        if any(other.measure == row.measure for other in others):
            if row.machine not in shares:
                shares[row.machine] = fitted(others)
            factor = row.planned(shares[row.machine]) / row.published
            held_out.setdefault(row.measure, []).append(factor)
            left_out = _percent(factor)
        batch = f" -ub {row.row['batch']}" if "batch" in row.row else ""
        cells = [row.host["gpu"], row.row["model"], row.row["weights"] or "as stored"]
        cells += [f"`{_flag(row.row)}{batch}`", row.measure]
        cells += [f"{row.published:.1f}", f"{plan:.1f}", _percent(plan / row.published), left_out]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for measure, factors in errors.items():
        machines = len({row.machine for row in rows if row.measure == measure})
        where = "1 machine" if machines == 1 else f"{machines} machines"
        line = f"* {measure}, {len(factors)} figures of {where}: {_summary(factors)}"
        if measure in held_out:
            line += f"; with the machine left out {_summary(held_out[measure])}"
        lines.append(f"{line}.")
    lines += ["", "Sources:", ""]
    for host in {row.machine: row.host for row in rows}.values():
        rated = ", as its maker rates the processor" if host["rated"] else ""
        lines.append(f"* {host['source']}. Planned with RAM of {host['ram']}{rated}.")
    return "\n".join(lines)


def _percent(factor: float) -> str:
    return f"{round(100 * (factor - 1)):+d} %"


def _summary(factors: Sequence[float]) -> str:
    off = exp(median(abs(log(factor)) for factor in factors))
    ends = _percent(min(factors)), _percent(max(factors))
    return f"a factor of {off:.2f} in the median, from {ends[0]} to {ends[1]}"


if __name__ == "__main__":
    if "--fit" in sys.argv:
        print(fitted(set_ups()))
    else:
        put_part(PAGE, "offload_error.py", __doc__, table)
