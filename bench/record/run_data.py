"""A result with its request table, as read by comparisons and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ..quality.positions import QualitySeries
from ..tasks.items import TaskItems
from .requests_table import REQUESTS_NAME, requests_table
from .result import BenchRun, read_result


@dataclass(frozen=True, slots=True)
class RunData:
    """A result and, where present, its request table by column, its quality per position, and its tasks'
    scores per item."""

    result: dict[str, Any]
    requests: dict[str, list[Any]] | None = None
    series: QualitySeries | None = None
    items: TaskItems | None = None

    @classmethod
    def of_run(cls, run: BenchRun) -> RunData:
        return cls(run.result, requests_table(run.passes), run.series, run.items)

    @classmethod
    def read(cls, path: Path) -> RunData:
        """Read a run folder, or a `result.json` with the request table beside it.

        Raises:
            BadInput: no such result, or a damaged file.
        """
        result = read_result(path)
        series, items = QualitySeries.beside(path), TaskItems.beside(path)
        table = (path if path.is_dir() else path.parent) / REQUESTS_NAME
        if not table.is_file():
            return cls(result, series=series, items=items)
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return cls(result, pq.read_table(table).to_pydict(), series, items)
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInput(f"{table} is damaged: {error}") from error

    @property
    def name(self) -> str:
        return self.result["llmopt"]["name"]

    def values(self, key: str) -> list[float]:
        """A metric's value in each pass, without passes that have none."""
        values = [value_of_pass(run, key) for run in self.result["llmopt"]["runs"]]
        return [value for value in values if value]

    def by_request(self, column: str) -> dict[str, list[float]]:
        """A column's values by request id, in the order of the passes."""
        found: dict[str, list[float]] = {}
        if self.requests:
            for request, value in zip(
                self.requests["request_id"], self.requests[column], strict=True
            ):
                if value is not None:
                    found.setdefault(request, []).append(value)
        return found


def value_of_pass(run: Mapping[str, Any], key: str) -> float | None:
    """A metric of a pass; None where it has none.

    Goodput or SLO share of a pass in which no request is good is what half a request would give, since values
    are compared as ratios.
    """
    value = run.get(key)
    if value == 0 and key == "request_goodput":
        return 0.5 / run["duration"]
    if value == 0 and key == "slo_share":
        return 0.5 / max(1, run["completed"] + run["failed"])
    return value
