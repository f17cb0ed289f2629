"""Print the error of disaggregated deployments, of which nothing is fitted, with the planner's parameters.

    python -m tools.plan_error.disaggregated [--data silicon_sample.csv]

Prompts wait for one of the prefill workers, each of which computes one at a time; answers come from the
decode workers, whose steps hold an equal share of the clients and no prompt. The move of the cache between
them is not modelled. Rows that do not say how many workers there were are not predicted.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from llmopt.base.errors import BadInput
from llmopt.engine.planner.error_bands import MEASURES
from llmopt.engine.planner.step_model import StepModel, StepWork, generation

from .columns import Predicted
from .report import HEADER, LEGEND, errors, line
from .rows import MEASURED_COLUMNS, described, packaged_csv, parallelism

ROUNDS = 50
"""Rounds of finding the rate of a closed loop, on which the TTFT depends and which depends on it."""


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """A measured configuration: clients, lengths, workers of both pools with their step models, medians."""

    engine: str
    clients: int
    prompt: int
    output: int
    prefill_workers: int
    decode_workers: int
    prefill: StepModel
    decode: StepModel
    measured: tuple[float, float]

    def predicted(self) -> tuple[float, float]:
        """TTFT and TPOT in seconds."""
        resident = max(1.0, self.clients / self.decode_workers)
        context = self.prompt + self.output / 2
        tpot = self.decode.seconds(StepWork(round(resident), round(resident) * context))
        one = self.prefill.seconds(StepWork.of(0, 0, self.prompt))
        one_by_one = one / self.prefill_workers
        answer = (self.output - 1) * tpot
        ttft = one
        for _ in range(ROUNDS):
            busy = self.clients * one_by_one / (ttft + answer)
            # Of a closed loop no more than the other clients wait.
            waiting = (
                min(self.clients - 1, busy**2 / (2 * (1 - busy))) if busy < 1 else self.clients - 1
            )
            ttft = (ttft + one + waiting * one_by_one) / 2
        return ttft + self.prefill.parameters.values["load.fixed"], tpot


def read(path: Path) -> tuple[list[Disaggregated], int]:
    """Configurations whose workers are known, and how many are not."""
    same: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["mode"] == "disagg":
                clients = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
                row["clients"] = clients[1] if clients else ""
                key = tuple(value for name, value in row.items() if name not in MEASURED_COLUMNS)
                same[key].append(row)
    found = [_configuration(rows) for rows in same.values()]
    return [one for one in found if one is not None], found.count(None)


def _configuration(rows: list[dict[str, str]]) -> Disaggregated | None:
    first = rows[0]
    workers = [first[f"{pool}_num_workers"] for pool in ("prefill", "decode")]
    if not all(workers) or not first["clients"]:
        return None
    try:
        prefill, decode = (_pool(first, pool) for pool in ("prefill", "decode"))
    except BadInput:
        return None
    ttft, tpot = (
        median(float(row[f"silicon_{name}_ms"]) for row in rows) / 1e3 for name in ("ttft", "tpot")
    )
    return Disaggregated(
        engine=first["backend"],
        clients=int(first["clients"]),
        prompt=int(float(first["isl"])),
        output=int(float(first["osl"])),
        prefill_workers=int(float(workers[0])),
        decode_workers=int(float(workers[1])),
        prefill=prefill,
        decode=decode,
        measured=(ttft, tpot),
    )


def _pool(row: Mapping[str, str], pool: str) -> StepModel:
    planned, recipe, device = described(row)
    names = ("tp", "attention_dp", "moe_tp", "moe_ep")
    sizes = {f"{name}_size": row[f"{pool}_{name}_size"] for name in names}
    # As in `columns.kv_bytes`: all of these rows are of dated runs.
    eight_bits = row["backend"] == "trtllm" or generation(device) == "blackwell"
    return StepModel.build(
        planned.shape,
        recipe,
        device,
        model=planned.name,
        engine=row["backend"],
        version=row["backend_version"],
        parallel=parallelism(sizes),
        kv_bytes_per_element=1.0 if eight_bits else 2.0,
    )


def lines(path: Path) -> list[str]:
    """The table of errors, of all and by engine."""
    rows, unknown = read(path)
    table = [f"disaggregated, unfitted; {unknown} configurations of unknown workers are left out"]
    ttft, tpot = np.array([row.predicted() for row in rows]).T
    measured = np.array([row.measured for row in rows]).T
    found = errors(_throughputs(rows, ttft, tpot), _throughputs(rows, *measured))
    engines = np.array([row.engine for row in rows])
    table.append(line("  disaggregated", found))
    for engine in sorted(set(engines)):
        mine = {name: found[name][engines == engine] for name in MEASURES}
        table.append(line(f"  disaggregated, {engine}", mine))
    return table


def _throughputs(rows: list[Disaggregated], ttft: np.ndarray, tpot: np.ndarray) -> Predicted:
    output = np.array([row.output for row in rows])
    clients = np.array([row.clients for row in rows])
    return Predicted(ttft, tpot, clients * output / (ttft + (output - 1) * tpot))


def main() -> None:
    """Judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    print(HEADER, LEGEND, *lines(parser.parse_args().data or packaged_csv()), sep="\n")


if __name__ == "__main__":
    main()
