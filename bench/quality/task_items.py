"""Task scores per item (`tasks.parquet`), intervals and tests that pair two models item by item; tables of
task scores."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, Self, get_args

import numpy as np

from ...base.errors import BadInput
from ..metrics.statistics import CONFIDENCE, central_interval
from .positions import readable

TASKS_NAME = "tasks.parquet"
COLUMNS = (
    "task",
    "doc_id",
    "doc_hash",
    "metric",
    "filter",
    "value",
    "weight",
    "response",
    "target",
)
# A metric's value from its items, (values, weights).
Aggregation = Literal["mean", "perplexity", "bits"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
RESAMPLES = 2000  # more than elsewhere: an item's score has few values
_BATCH = 100  # resamples whose indices are in memory at once
Interval = tuple[float, float]


def aggregate(aggregation: Aggregation, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The metric over the last axis. `mean`: Σv / Σw. `perplexity`: exp(−Σv / Σw), of log-likelihoods over
    words, bytes or items. `bits`: −Σv / Σw / ln 2."""
    ratio = values.sum(-1) / weights.sum(-1)
    if aggregation == "perplexity":
        return np.exp(-ratio)
    return -ratio / math.log(2) if aggregation == "bits" else ratio


@dataclass(frozen=True, slots=True)
class ItemScores:
    """One metric of one task, by document: keys (document id, its hash), values and weights (float64
    [items]), and answers of the model, or the log-likelihoods of the choices."""

    keys: tuple[tuple[int, str], ...]
    values: np.ndarray
    weights: np.ndarray
    responses: tuple[str, ...] = ()

    @property
    def is_binary(self) -> bool:
        return bool(np.isin(self.values, (0.0, 1.0)).all() and (self.weights == 1).all())

    @property
    def answers(self) -> np.ndarray | None:
        """The option of the highest log-likelihood of each item, int64 [items], if items have options."""
        try:
            options = [
                [float(score) for score, _ in ast.literal_eval(text)] for text in self.responses
            ]
        except (ValueError, TypeError, SyntaxError):
            return None
        if not options or not all(options):
            return None
        return np.array([int(np.argmax(scores)) for scores in options])


@dataclass(frozen=True, slots=True)
class TaskItems:
    """The rows of `tasks.parquet`, by column."""

    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def beside(cls, result: Path) -> Self | None:
        """The items in a run folder, or next to a `result.json`, if there are any. Raises BadInput: a damaged
        file, or one that llmopt did not write."""
        import pyarrow.parquet as pq

        path = (result if result.is_dir() else result.parent) / TASKS_NAME
        if not path.is_file():
            return None
        with readable(path):
            columns = pq.read_table(path).to_pydict()
        if missing := set(COLUMNS) - set(columns):
            raise BadInput(f"{path} has no column {', '.join(sorted(missing))}")
        return cls(columns)

    def __len__(self) -> int:
        return len(self.columns["task"]) if self.columns else 0

    def joined(self, others: TaskItems) -> TaskItems:
        if not self.columns or not others.columns:
            return self if self.columns else others
        return TaskItems({name: [*self.columns[name], *others.columns[name]] for name in COLUMNS})

    def write(self, folder: Path) -> None:
        """Write `tasks.parquet` into a run folder, if there are items."""
        if not len(self):
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(dict(self.columns)), folder / TASKS_NAME, compression="zstd")

    def of(self, task: str, metric: str, filter_name: str) -> ItemScores | None:
        """The items of a metric, if there are any."""
        wanted, columns = (task, metric, filter_name), self.columns
        if not columns:
            return None
        named = zip(columns["task"], columns["metric"], columns["filter"], strict=True)
        rows = [row for row, name in enumerate(named) if name == wanted]
        if not rows:
            return None
        return ItemScores(
            tuple((columns["doc_id"][row], columns["doc_hash"][row]) for row in rows),
            np.array([columns["value"][row] for row in rows], dtype=np.float64),
            np.array([columns["weight"][row] for row in rows], dtype=np.float64),
            tuple(columns["response"][row] for row in rows),
        )


def metric_rows(outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per metric of the results of `simple_evaluate`; groups follow their tasks."""
    rows = []
    groups = outcome.get("groups", {})
    for task, values in {**outcome["results"], **groups}.items():
        for key, value in values.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kept}")
            rows.append(
                {
                    "task": task,
                    "is_group": task in groups,
                    "version": outcome["versions"].get(task),
                    "num_fewshot": outcome["n-shot"].get(task),
                    "num_samples": outcome["n-samples"].get(task, {}).get("effective"),
                    "metric": metric,
                    "filter": kept,
                    "value": value,
                    "stderr": stderr if isinstance(stderr, int | float) else None,
                    "higher_is_better": outcome["higher_is_better"].get(task, {}).get(metric),
                }
            )
    return rows


def items_of(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], rows: Sequence[dict[str, Any]]
) -> TaskItems:
    """The items of the samples that lm-eval logs, for each metric that follows from them. Sets `aggregation`
    of each row: the one that reproduces lm-eval's value from the items; None if none does (BLEU, F1 over all
    items, groups)."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in rows:
        logged = [
            sample
            for sample in samples.get(row["task"], ())
            if sample["filter"] == row["filter"] and row["metric"] in sample
        ]
        parts = [_parts(sample[row["metric"]]) for sample in logged]
        row["aggregation"] = None
        if parts and None not in parts:
            values, weights = np.array(parts, dtype=np.float64).T
            row["aggregation"] = _aggregation(values, weights, row["value"])
        if row["aggregation"] is None:
            continue
        for sample, part in zip(logged, parts, strict=True):
            assert part is not None
            ids = int(sample["doc_id"]), str(sample["doc_hash"])
            texts = _text(sample["filtered_resps"]), _text(sample["target"])
            cells = (row["task"], *ids, row["metric"], row["filter"], *part, *texts)
            for name, value in zip(COLUMNS, cells, strict=True):
                columns[name].append(value)
    return TaskItems(columns if columns["task"] else {})


def _aggregation(values: np.ndarray, weights: np.ndarray, value: float) -> Aggregation | None:
    for kind in AGGREGATIONS:
        if np.isclose(aggregate(kind, values, weights), value, rtol=1e-6, atol=1e-12):
            return kind
    return None


def _parts(value: Any) -> tuple[float, float] | None:
    """(value, weight) of an item: a number, or a log-likelihood with its number of words or bytes."""
    if isinstance(value, bool | int | float):
        return float(value), 1.0
    if isinstance(value, tuple | list) and len(value) == 2:
        first, second = value
        if isinstance(first, int | float) and isinstance(second, int | float) and second > 0:
            return float(first), float(second)
    return None


def _text(value: Any) -> str:
    """A response or target as text; for choices, the log-likelihoods."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else str(value)


def score_words(row: Mapping[str, Any]) -> str:
    """`0.4250 ± 0.0350`; a standard error only if lm-eval gives one."""
    stderr = row["stderr"]
    return f"{row['value']:.4f}" + (f" ± {stderr:.4f}" if stderr is not None else "")


def metric_name(row: Mapping[str, Any]) -> str:
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def task_rows(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """(run, row) of the task scores of one or several runs, aligned by metric."""
    rows = [(name, row) for name, part in parts.items() for row in part["metrics"]]
    keys = dict.fromkeys((row["task"], metric_name(row)) for _, row in rows)
    order = {key: rank for rank, key in enumerate(keys)}
    return sorted(rows, key=lambda pair: order[pair[1]["task"], metric_name(pair[1])])


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test: of the items with another score, half are gains. `lost` and
    `gained` are the items that only the base, and only the new run, has right."""
    changed = lost + gained
    tail = sum(math.comb(changed, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**changed)


def tango_interval(lost: int, gained: int, count: int) -> Interval:
    """Score interval of the difference of two paired proportions, (gained − lost) / count. Tango, Statistics
    in Medicine 17 (1998): holds its level for few changed items too; with none it is ± z² / (count + z²)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    difference = (gained - lost) / count

    def distance(delta: float) -> float:
        """Standard errors from the difference to `delta`, under `delta`."""
        a = 2 * count
        b = -gained - lost + (2 * count - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        # The likeliest share of losses if the difference is delta.
        share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = count * (2 * share + delta * (1 - delta))
        gap = count * (difference - delta)
        if variance <= 0:
            return math.copysign(math.inf, gap) if gap else 0.0
        return gap / math.sqrt(variance)

    low = root_of(lambda delta: distance(delta) <= z, -1.0, difference)
    high = root_of(lambda delta: distance(delta) < -z, difference, 1.0)
    return low, high


def wilson_interval(right: int, count: int) -> Interval:
    """Score interval of a proportion (Wilson, 1927)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (right + z * z / 2) / (count + z * z)
    reach = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def bootstrap_interval(
    aggregation: Aggregation,
    weights: np.ndarray,
    new: np.ndarray,
    base: np.ndarray | None = None,
    base_weights: np.ndarray | None = None,
    seed: int = 0,
) -> Interval:
    """Percentile interval of a metric, or with a base of its relative change: items are resampled, the same
    for both sides. Arrays are float64 [items]; the base has the same weights, unless it has its own."""
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(0, RESAMPLES, _BATCH):
        chosen = rng.integers(0, len(new), size=(_BATCH, len(new)))
        values = aggregate(aggregation, new[chosen], weights[chosen])
        if base is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                own = weights if base_weights is None else base_weights
                values = values / aggregate(aggregation, base[chosen], own[chosen]) - 1
        draws.append(values)
    return central_interval(np.nan_to_num(np.concatenate(draws), nan=0.0), method="inverted_cdf")


def root_of(is_above: Callable[[float], bool], low: float, high: float) -> float:
    """The value at which a condition that is false at `low` becomes true, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return (low + high) / 2
