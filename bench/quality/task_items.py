"""Task scores per item (`tasks.parquet`), compared item by item; tables of task scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from ...quant.base.errors import BadInput
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
# How a metric's value follows from its items: from (values, weights).
Aggregation = Literal["mean", "perplexity", "bits"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def aggregate(aggregation: Aggregation, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The metric over the last axis.

    `mean`: Σv / Σw. `perplexity`: exp(−Σv / Σw), of log-likelihoods over words, bytes or items.
    `bits`: −Σv / Σw / ln 2.
    """
    ratio = values.sum(-1) / weights.sum(-1)
    if aggregation == "perplexity":
        return np.exp(-ratio)
    return -ratio / math.log(2) if aggregation == "bits" else ratio


@dataclass(frozen=True, slots=True)
class ItemScores:
    """One metric of one task, by document.

    Attributes:
        keys: (document id, its hash).
        values, weights: float64 [items].
        responses: what the model said, or the log-likelihoods of the choices.
    """

    keys: tuple[tuple[int, str], ...]
    values: np.ndarray
    weights: np.ndarray
    responses: tuple[str, ...] = ()

    @property
    def is_binary(self) -> bool:
        """Whether every item is right or wrong."""
        return bool(np.isin(self.values, (0.0, 1.0)).all() and (self.weights == 1).all())


@dataclass(frozen=True, slots=True)
class TaskItems:
    """The rows of `tasks.parquet`, by column."""

    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def beside(cls, result: Path) -> Self | None:
        """The items in a run folder, or beside a `result.json`; None where there are none.

        Raises:
            BadInput: a damaged file, or none of llmopt's.
        """
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

    def write(self, folder: Path) -> None:
        """`tasks.parquet` into a run folder; nothing where there are no items."""
        if not len(self):
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(dict(self.columns)), folder / TASKS_NAME, compression="zstd")

    def of(self, task: str, metric: str, filter_name: str) -> ItemScores | None:
        """The items of a metric; None where there are none."""
        wanted = (task, metric, filter_name)
        columns = self.columns
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


def items_of(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], rows: Sequence[dict[str, Any]]
) -> TaskItems:
    """The items of the samples that lm-eval logs, for each metric that follows from them.

    Sets `aggregation` of each row: the one that reproduces lm-eval's value from the items; None where none
    does (BLEU, F1 over all items, groups).
    """
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in rows:
        logged = [
            sample
            for sample in samples.get(row["task"], ())
            if sample["filter"] == row["filter"] and row["metric"] in sample
        ]
        parts = [_parts(sample[row["metric"]]) for sample in logged]
        row["aggregation"] = _aggregation(parts, row["value"])
        if row["aggregation"] is None:
            continue
        for sample, part in zip(logged, parts, strict=True):
            assert part is not None
            values = (
                row["task"],
                int(sample["doc_id"]),
                str(sample["doc_hash"]),
                row["metric"],
                row["filter"],
                *part,
                _text(sample["filtered_resps"]),
                _text(sample["target"]),
            )
            for name, value in zip(COLUMNS, values, strict=True):
                columns[name].append(value)
    return TaskItems(columns if columns["task"] else {})


def _parts(value: Any) -> tuple[float, float] | None:
    """(value, weight) of an item: a number, or a log-likelihood with its number of words or bytes."""
    if isinstance(value, bool | int | float):
        return float(value), 1.0
    if isinstance(value, tuple | list) and len(value) == 2:
        first, second = value
        if isinstance(first, int | float) and isinstance(second, int | float) and second > 0:
            return float(first), float(second)
    return None


def _aggregation(parts: Sequence[tuple[float, float] | None], value: float) -> Aggregation | None:
    if not parts or None in parts:
        return None
    values, weights = np.array(parts, dtype=np.float64).T
    for kind in AGGREGATIONS:
        if np.isclose(aggregate(kind, values, weights), value, rtol=1e-6, atol=1e-12):
            return kind
    return None


def _text(value: Any) -> str:
    """A response or target as text; of choices, the log-likelihoods."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else str(value)


def score_words(row: Mapping[str, Any]) -> str:
    """`0.4250 ± 0.0350`; a standard error only where lm-eval gives one."""
    stderr = row["stderr"]
    return f"{row['value']:.4f}" + (f" ± {stderr:.4f}" if stderr is not None else "")


def metric_name(row: Mapping[str, Any]) -> str:
    """The metric's name, with its filter unless that is lm-eval's default."""
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def task_rows(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """(run, row) of the task scores of one or several runs, aligned by metric."""
    rows = [(name, row) for name, part in parts.items() for row in part["metrics"]]
    keys = dict.fromkeys((row["task"], metric_name(row)) for _, row in rows)
    order = {key: place for place, key in enumerate(keys)}
    return sorted(rows, key=lambda pair: order[pair[1]["task"], metric_name(pair[1])])
