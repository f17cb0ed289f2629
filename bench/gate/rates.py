"""Error rates of two single runs, on recorded starts: all ordered pairs of starts of one model, as they are
and with one of the two scaled to be slower.

`job_rates` has those of paired starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from .compare import RunData, compare
from .gate import Limit, Outcome

LATENCIES = ("ttft_ms", "tpot_ms", "e2el_ms")
STATISTICS = ("median", "mean", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Rates:
    """The gate's outcomes over `pairs` pairs of runs, as fractions."""

    factor: float
    pairs: int
    regression: float
    no_verdict: float
    passed: float


def read_starts(path: Path) -> list[RunData]:
    """The recorded starts, each as a run."""
    import pyarrow.parquet as pq

    starts: dict[int, list[dict[str, Any]]] = {}
    for row in pq.read_table(path).to_pylist():
        starts.setdefault(row["start"], []).append(row)
    return [as_run(number, rows) for number, rows in starts.items()]


def as_run(number: int, rows: Sequence[dict[str, Any]], factor: float = 1.0) -> RunData:
    """A start's rows as a result with its table of requests, all times multiplied by `factor`."""
    rows = [
        {**row, **{column: row[column] * factor for column in LATENCIES if row[column] is not None}}
        for row in rows
    ]
    runs = []
    for name in dict.fromkeys(row["pass"] for row in rows):
        of_pass = [row for row in rows if row["pass"] == name]
        tokens = sum(row["output_len"] for row in of_pass)
        figures = {
            "duration": of_pass[0]["duration_s"] * factor,
            "output_throughput": tokens / (of_pass[0]["duration_s"] * factor),
            "other_load": of_pass[0]["other_load"],
        }
        for column in LATENCIES:
            values = [row[column] for row in of_pass if row[column] is not None]
            for statistic in STATISTICS:
                reduce = {"median": np.median, "mean": np.mean}.get(statistic)
                value = reduce(values) if reduce else np.percentile(values, int(statistic[1:]))
                figures[f"{statistic}_{column}"] = float(value)
        runs.append(figures)
    identity = {
        "workload_sha256": "recorded",
        "load": {},
        "target": "in-process",
        "engine": {},
        "device": "cpu",
        "machine": "recorded",
        "model": "stories3M",
        "quantization": None,
        "dtype": "bfloat16",
    }
    record = {
        "run_id": f"{number} at {factor}",
        "arms": None,
        "name": f"start {number}",
        "interrupted": False,
        "slowdown": factor,
        "identity": identity,
        "runs": runs,
        "quality": None,
        "memory": {},
    }
    result = {
        "failed": 0,
        "completed": len(rows),
        "total_output_tokens": sum(row["output_len"] for row in rows),
        "llmopt": record,
    }
    return RunData(result, {key: [row[key] for row in rows] for key in rows[0]})


def slowed(data: RunData, factor: float) -> RunData:
    """The same start, with all times multiplied by `factor`."""
    return as_run(*rows_of(data), factor)


def rows_of(data: RunData) -> tuple[int, list[dict[str, Any]]]:
    """(number of the start, its rows): the arguments of `as_run`."""
    table = data.requests or {}
    rows = [{key: table[key][row] for key in table} for row in range(len(table["request_id"]))]
    return int(table["start"][0]), rows


def passes_of(data: RunData, count: int) -> RunData:
    """The first `count` passes of a start."""
    number, rows = rows_of(data)
    return as_run(number, [row for row in rows if row["pass"] < count])


def error_rates(
    starts: Sequence[RunData],
    *,
    factor: float,
    threshold: float = 0.05,
    limits: Sequence[Limit] = (),
    passes: int | None = None,
) -> Rates:
    """The gate's outcomes over all ordered pairs of different starts, the second `factor` times slower.
    `passes` limits the passes of each start to the first few."""
    if passes is not None:
        starts = [passes_of(start, passes) for start in starts]
    new = [slowed(start, factor) for start in starts]
    outcomes = [
        compare(starts[i], new[j], threshold=threshold, limits=limits).outcome
        for i, j in permutations(range(len(starts)), 2)
    ]
    kinds = (Outcome.REGRESSION, Outcome.NO_VERDICT, Outcome.PASS)
    return Rates(factor, len(outcomes), *(outcomes.count(kind) / len(outcomes) for kind in kinds))
