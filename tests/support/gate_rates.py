"""Error rates of the gate on recorded starts, of single runs and of whole jobs of paired starts.

Single runs: all ordered pairs of starts of one model, as they are and with one scaled to be slower. Jobs:
recorded blocks of pairs are drawn with replacement until the job's time is over, for a start has a duration,
the sides of half of them swapped, and go through the sequential test. A slowdown is injected as what it does
to a start: spinning lengthens wall and CPU time, sleeping wall and waiting time. `tools/record_gate_runs.py`
makes the recordings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from llmopt.bench.gate.compare import RunData, compare
from llmopt.bench.gate.limits import GateOutcome, Limit
from llmopt.bench.gate.measured import WAITING, change_of_passes
from llmopt.bench.gate.verdict import CODES, SequentialPlan, decide

LATENCIES = ("ttft_ms", "tpot_ms", "e2el_ms")
RATE_STATISTICS = ("median", "mean", "p90", "p95", "p99")


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
            for statistic in RATE_STATISTICS:
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
    kinds = (GateOutcome.REGRESSION, GateOutcome.NO_VERDICT, GateOutcome.PASS)
    return Rates(factor, len(outcomes), *(outcomes.count(kind) / len(outcomes) for kind in kinds))


JOBS = 2000
METRICS = ("duration", "cpu_seconds", WAITING)
# Recordings of before have no wall time of a start; that of identical-starts is taken.
SECONDS_PER_START = 10.0


@dataclass(frozen=True, slots=True)
class RecordedPairs:
    """The changes of recorded pairs.

    Attributes:
        changes: by metric, logarithms (of waiting time shares of the wall time), as (blocks, pairs of a
            block).
        seconds: wall time of a pair, by block and pair.
    """

    name: str
    changes: Mapping[str, np.ndarray]
    seconds: np.ndarray

    @property
    def has_cpu(self) -> bool:
        return "cpu_seconds" in self.changes

    @property
    def num_pairs(self) -> int:
        return self.seconds.size


@dataclass(frozen=True, slots=True)
class JobRates:
    """The outcomes of resampled jobs, as counts, and what a job is."""

    jobs: int
    regression: int
    no_verdict: int
    passed: int
    max_pairs: int
    mean_pairs: float


def read_pairs(path: Path, new_side: int = 1) -> RecordedPairs:
    """The pairs of side 0 and `new_side` of a recording: of starts in turns pass by pass, of starts one
    after the other by their medians, of an old recording of requests by every four successive starts as
    ABBA."""
    import pandas as pd

    table: Any = pd.read_parquet(path)
    if "block" not in table:
        return _pairs_of_old(path.stem, table)
    in_turns = table.groupby(["block", "side"])["start"].nunique().max() == 1
    blocks = [block for _, block in table.groupby("block")]
    wanted = table["side"].max() + 1
    blocks = [block for block in blocks if block["side"].nunique() == wanted]
    read = _changes_in_turns if in_turns else _changes_of_medians
    changes = [read(block, new_side) for block in blocks]
    count = len(changes[0]["duration"])
    seconds = [block.groupby("start")["start_seconds"].first().to_numpy() for block in blocks]
    # A pair of starts in turns loads both at once: of a block of more sides it takes the share of two.
    per_pair = [
        np.full(count, each[0] * 2 / len(each) if in_turns else each.sum() / count)
        for each in seconds
    ]
    return RecordedPairs(
        path.stem,
        {metric: np.array([change[metric] for change in changes]) for metric in METRICS},
        np.array(per_pair),
    )


def _changes_of_medians(block: Any, new_side: int) -> dict[str, list[float]]:
    starts = block.groupby(["side", "place"])[["duration", "cpu_seconds", WAITING]].median()
    base, new = (starts.loc[side].sort_index() for side in (0, new_side))
    return {
        "duration": list(np.log(new["duration"].values / base["duration"].values)),
        "cpu_seconds": list(np.log(new["cpu_seconds"].values / base["cpu_seconds"].values)),
        WAITING: list((new[WAITING].values - base[WAITING].values) / base["duration"].values),
    }


def _changes_in_turns(block: Any, new_side: int) -> dict[str, list[float]]:
    base, new = (block[block["side"] == side].set_index("pass") for side in (0, new_side))
    logs = {
        key: change_of_passes(list(np.log(new[key] / base[key])), key)
        for key in ("duration", "cpu_seconds")
    }
    waiting = (new[WAITING].median() - base[WAITING].median()) / base["duration"].median()
    return {**{key: [float(value)] for key, value in logs.items()}, WAITING: [float(waiting)]}


def _pairs_of_old(name: str, table: Any) -> RecordedPairs:
    passes = table.groupby(["start", "pass"])["duration_s"].first()
    logs = np.log(passes.groupby("start").median().to_numpy())
    four = logs[: len(logs) // 4 * 4].reshape(-1, 4)
    changes = np.stack([four[:, 1] - four[:, 0], four[:, 2] - four[:, 3]], axis=1)
    return RecordedPairs(name, {"duration": changes}, np.full(changes.shape, 2 * SECONDS_PER_START))


@dataclass(frozen=True, slots=True)
class Slowdown:
    """An injected slowdown of the new side's steps, as what it adds to the changes of a pair."""

    name: str
    added: Callable[[float], Mapping[str, float]]


def spinning(factor: float) -> dict[str, float]:
    return {"duration": math.log(factor), "cpu_seconds": math.log(factor), WAITING: 0.0}


def sleeping(factor: float) -> dict[str, float]:
    return {"duration": math.log(factor), "cpu_seconds": 0.0, WAITING: factor - 1}


SLOWDOWNS = (Slowdown("spin", spinning), Slowdown("sleep", sleeping))


def job_rates(
    pairs: RecordedPairs,
    limits: Sequence[Limit],
    added: Mapping[str, float],
    *,
    seconds: float,
    swaps: bool = True,
    jobs: int = JOBS,
    seed: int = 0,
) -> JobRates:
    """The outcomes of `jobs` resampled jobs of `seconds` under upper limits on the change of metrics.

    Args:
        swaps: whether the two sides of a recorded block did the same work, and may change places.
    """
    rng = np.random.default_rng(seed)
    max_pairs = max(2, int(seconds / pairs.seconds.mean()))
    num_blocks, size = pairs.seconds.shape
    drawn = rng.integers(0, num_blocks, (jobs, -(-max_pairs // size)))
    signs = rng.choice((-1.0, 1.0), drawn.shape) if swaps else np.ones(drawn.shape)
    plan = SequentialPlan(max_pairs, len(limits))
    codes, ends = [], []
    for limit in limits:
        key = limit.quantity.key
        changes = pairs.changes[key][drawn] * signs[..., None] + added[key]
        changes = changes.reshape(jobs, -1)[:, :max_pairs]
        code, end = decide(changes - limit.allowed, plan)
        codes.append(code)
        ends.append(end)
    worst = np.array(codes)
    regression = (worst == CODES.index(GateOutcome.REGRESSION)).any(axis=0)
    passed = (worst == CODES.index(GateOutcome.PASS)).all(axis=0)
    return JobRates(
        jobs,
        int(regression.sum()),
        int((~regression & ~passed).sum()),
        int(passed.sum()),
        max_pairs,
        float(np.array(ends).max(axis=0).mean()),
    )


def binomial_interval(count: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share."""
    from llmopt.bench.metrics.statistics import binomial_tails

    tail = (1 - confidence) / 2

    def bisect(is_low_enough: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if is_low_enough(middle) else (low, middle)
        return (low + high) / 2

    low = bisect(lambda share: binomial_tails(count, trials, share)[0] < tail) if count else 0.0
    high = bisect(lambda share: binomial_tails(count, trials, share)[1] > tail)
    return low, 1.0 if count == trials else high
