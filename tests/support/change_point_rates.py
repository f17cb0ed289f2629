"""Series with and without changes, synthetic and of recorded starts, and the change points found in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llmopt.bench.gate.limits import MEASURED, GateOutcome
from llmopt.bench.metrics.run_statistics import HEADLINES
from llmopt.bench.studies.history_check import check_history
from llmopt.bench.studies.history_runs import MAX_OTHER_LOAD, HistoryRun
from llmopt.bench.studies.history_series import change_points

from .gate_rates import read_starts

STEP = 5.0
SHAPES: Mapping[str, Sequence[float]] = {
    "one loss": (1.0,),
    "one gain": (-1.0,),
    "two losses": (1.0, 1.0),
    "loss and recovery": (1.0, -1.0),
    "loss, gain, loss": (1.0, -1.2, 1.5),
    "six losses": (1.0,) * 6,
}
"""Changes of a series, in units of `STEP` standard deviations."""
LOSS = 0.04
SHORTEST, LONGEST = 8, 20
SLOWDOWN = 1.3


@dataclass(slots=True)
class Tally:
    """Changes of some series, how many were found within one run, and change points that are none."""

    series: int = 0
    runs: int = 0
    changes: int = 0
    near: int = 0
    extra: int = 0

    def add(self, truth: Sequence[int], values: np.ndarray) -> None:
        """Count the change points of `values`, whose changes are at `truth`."""
        seen = points_of(values)
        near = [change for change in truth if any(abs(change - point) <= 1 for point in seen)]
        self.series += 1
        self.runs += len(values)
        self.changes += len(truth)
        self.near += len(near)
        self.extra += sum(all(abs(change - point) > 1 for change in truth) for point in seen)

    def row(self, series: str, noise: str) -> list[str]:
        counts = (
            self.series,
            self.runs,
            self.changes,
            self.near,
            self.changes - self.near,
            self.extra,
        )
        return [series, noise, *map(str, counts)]


class Noise:
    """Noise with a standard deviation of 1, of several kinds, each from the generator of the tool."""

    def __init__(self, recorded: Mapping[str, np.ndarray], rng: np.random.Generator) -> None:
        self._recorded = [logs - logs.mean() for logs in recorded.values()]
        self._rng = rng
        self.kinds = ("normal", "Student's t", "recorded")

    def draw(self, kind: str, count: int) -> np.ndarray:
        if kind == "normal":
            return self._rng.normal(size=count)
        if kind == "Student's t":
            return self._rng.standard_t(3, size=count) / math.sqrt(3)
        logs = self._recorded[self._rng.integers(len(self._recorded))]
        return self._rng.choice(logs, count) / logs.std()


def synthetic(
    noise: Noise, kind: str, shape: str, rng: np.random.Generator
) -> tuple[list[int], np.ndarray]:
    """(indices of the changes, values) of a series with changes of `STEP` standard deviations; the six losses
    are of 4 % each."""
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=len(SHAPES[shape]) + 1)
    changes = np.cumsum(lengths)[:-1]
    levels = np.concatenate([[0.0], np.cumsum(SHAPES[shape])])
    step = math.log1p(LOSS)
    logs = np.repeat(levels, lengths) * step + noise.draw(kind, int(lengths.sum())) * step / STEP
    return changes.tolist(), np.exp(logs)


def recorded_logs(path: Path) -> dict[str, np.ndarray]:
    """{metric: log of its geometric mean in each start}, of the starts on an idle machine."""
    starts = [
        start
        for start in read_starts(path)
        if np.mean([run["other_load"] for run in start.result["llmopt"]["runs"]]) <= MAX_OTHER_LOAD
    ]
    return {
        key: np.array([np.mean(np.log(start.values(key))) for start in starts]) for key in HEADLINES
    }


def points_of(values: np.ndarray) -> list[int]:
    return [point.index for point in change_points(values)]


def false_alarms_of_checks(noise: Noise, kind: str, count: int) -> int:
    """How many of `count` checks of a history that grows by a run each are regressions; 5 % is the limit, the
    noise has 2 %."""
    metric = MEASURED["median_tpot_ms"]
    identity = {"model": "m", "quantization": None, "dtype": "float32"}
    values = np.exp(noise.draw(kind, count) * 0.02)
    runs = [
        HistoryRun(f"{i:08}", f"{i:015}", f"{i}", "run", identity, None, {metric.key: float(value)})
        for i, value in enumerate(values)
    ]
    outcomes = [check_history(runs[:last], {metric: 0.05}).outcome for last in range(1, count + 1)]
    return outcomes.count(GateOutcome.REGRESSION)


def of_synthetic(
    noise: Noise, rng: np.random.Generator, count: int
) -> dict[tuple[str, str], Tally]:
    """{("synthetic", noise): tally}; shapes and noises take turns."""
    tallies = {("synthetic", kind): Tally() for kind in noise.kinds}
    pairs = [(shape, kind) for shape in SHAPES for kind in noise.kinds]
    for number in range(count):
        shape, kind = pairs[number % len(pairs)]
        tallies["synthetic", kind].add(*synthetic(noise, kind, shape, rng))
    return tallies


def of_recorded(
    recordings: Mapping[str, Mapping[str, np.ndarray]],
) -> dict[tuple[str, str], Tally]:
    """The recorded starts in their order: as they are, and slowed from each one on (8 on both sides)."""
    tallies: dict[tuple[str, str], Tally] = {}
    for name, metrics in recordings.items():
        unchanged = tallies[f"{name}", "as recorded"] = Tally()
        slowed = tallies[f"{name}, {SLOWDOWN:g} times slower", "as recorded"] = Tally()
        for key, logs in metrics.items():
            unchanged.add([], np.exp(logs))
            sign = -1 if "throughput" in key else 1
            for change in range(SHORTEST, len(logs) - SHORTEST + 1):
                step = np.where(np.arange(len(logs)) >= change, sign * math.log(SLOWDOWN), 0.0)
                slowed.add([change], np.exp(logs + step))
    return tallies
