"""Scores per position, in columns: `quality.parquet`, written in row groups as they come."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...base.errors import BadInput

QUALITY_NAME = "quality.parquet"
ROW_GROUP = 1 << 16  # rows kept in memory until they are written


@dataclass(frozen=True, slots=True)
class PositionScores:
    """Columns over scored positions, in the order of the passage.

    `position` is the token's index in its window, `nll` its negative log-likelihood in nats, and `rank` its
    rank in the model's distribution (1 is the likeliest). KL(reference ‖ model) is in nats. The other columns
    say if both models' likeliest token is the same, and the probability that the reference gives its
    likeliest. Without a reference the last six are None, as is each that a server does not report.
    """

    document: np.ndarray
    window: np.ndarray
    position: np.ndarray
    token_id: np.ndarray
    nll: np.ndarray
    rank: np.ndarray | None = None
    reference_nll: np.ndarray | None = None
    reference_rank: np.ndarray | None = None
    kl: np.ndarray | None = None
    top1: np.ndarray | None = None
    reference_top: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.nll)


TYPES = {
    "document": np.int32,
    "window": np.int32,
    "position": np.int32,
    "token_id": np.int32,
    "nll": np.float32,
    "rank": np.int32,
    "reference_nll": np.float32,
    "reference_rank": np.int32,
    "kl": np.float32,
    "top1": np.bool_,
    "reference_top": np.float32,
}
# The columns of `reduce_slice`, in its order.
SCORES = ("nll", "rank", "reference_nll", "reference_rank", "kl", "top1", "reference_top")


def typed(scores: PositionScores) -> dict[str, np.ndarray]:
    """The columns with values, in the types of the file."""
    columns = {name: getattr(scores, name) for name in TYPES}
    return {
        name: np.asarray(column, dtype=TYPES[name])
        for name, column in columns.items()
        if column is not None
    }


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise `BadInput` if a Parquet file that is read within is damaged."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} is damaged: {error}") from error


class QualitySeries:
    """A readable `quality.parquet`; columns are read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def beside(cls, result: Path) -> Self | None:
        """The series in a run folder, or next to a `result.json`, if there is one. Raises BadInput: the file
        is damaged, or not written by llmopt."""
        path = (result if result.is_dir() else result.parent) / QUALITY_NAME
        if not path.is_file():
            return None
        series = cls(path)
        missing = {"window", "position", "token_id", "nll"} - set(series.names)
        if missing:
            raise BadInput(f"{path} has no column {', '.join(sorted(missing))}")
        return series

    @property
    def names(self) -> list[str]:
        import pyarrow.parquet as pq

        with readable(self.path):
            return list(pq.read_schema(self.path).names)

    def column(self, name: str) -> np.ndarray | None:
        """A column over all positions, or None. Raises BadInput: the file is damaged."""
        import pyarrow.parquet as pq

        if name not in self.names:
            return None
        with readable(self.path):
            return pq.read_table(self.path, columns=[name]).column(0).to_numpy()

    def needed(self, name: str) -> np.ndarray:
        column = self.column(name)
        assert column is not None, name
        return column

    def copy_to(self, folder: Path) -> None:
        shutil.copyfile(self.path, folder / QUALITY_NAME)


class SeriesWriter:
    """Writes a temporary `quality.parquet`, which lives as long as the series that `finish` returns."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="llmopt-quality-")
        self._path = Path(self._folder.name) / QUALITY_NAME
        self._file: Any = None
        self._kept: list[dict[str, np.ndarray]] = []
        self._num_kept = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if self._file is not None:
                self._file.close()
            self._folder.cleanup()

    def add(self, scores: PositionScores) -> None:
        """Append positions. The columns that are None must be the same in every call."""
        self._kept.append(typed(scores))
        self._num_kept += len(scores)
        if self._num_kept >= ROW_GROUP:
            self._flush()

    def finish(self) -> QualitySeries:
        """The written series. Needs one position."""
        self._flush()
        self._file.close()
        series = QualitySeries(self._path)
        series._folder = self._folder
        return series

    def _flush(self) -> None:
        if self._kept:
            import pyarrow as pa
            import pyarrow.parquet as pq

            names = self._kept[0]
            columns = {name: np.concatenate([part[name] for part in self._kept]) for name in names}
            table = pa.table(columns)
            if self._file is None:
                self._file = pq.ParquetWriter(self._path, table.schema, compression="zstd")
            self._file.write_table(table, row_group_size=ROW_GROUP)
        self._kept, self._num_kept = [], 0
