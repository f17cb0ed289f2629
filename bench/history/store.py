"""Store of a history: one Parquet file per run, written under a temporary name and renamed.

A file is never changed, so writers need no lock: two of them write two files, or the same one twice. A killed
writer leaves a hidden partial file, which nothing reads. Histories merge by copying their files together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quant.base.errors import BadInput
from ..record.run_folder import atomic_file
from .run import HistoryRun

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("run_id", "date", "commit", "name", "series", "set_aside", "metric", "value")


def short_id(run: HistoryRun) -> str:
    return run.run_id[:12]


def file_name(run: HistoryRun) -> str:
    """`<date>-<run id>.parquet`: sorted by date, and the same for the same run."""
    return f"{run.date}-{short_id(run)}.parquet"


def add_runs(folder: Path, runs: Sequence[HistoryRun]) -> list[HistoryRun]:
    """Write the runs that the folder does not hold yet; returns them.

    Raises:
        BadInput: the folder is a file, or holds a run under another commit or date.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file: a history is a folder")
    missing = {}
    for run in runs:
        present = [_read(path) for path in folder.glob(f"*-{short_id(run)}.parquet")]
        if not present:
            missing[run.run_id] = run
        elif (present[0].commit, present[0].date) != (run.commit, run.date):
            raise BadInput(
                f"{folder / file_name(present[0])} holds run {short_id(run)} for commit "
                f"{present[0].commit}: remove it, to add the run for commit {run.commit} at {run.date}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for run in missing.values():
        _write(folder / file_name(run), run)
    return list(missing.values())


def read_runs(folder: Path) -> list[HistoryRun]:
    """All runs, in the order of their dates.

    Raises:
        BadInput: no such folder, or a file that is damaged or no run of a history.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder with a history: llmopt history add makes one")
    runs = {run.run_id: run for run in map(_read, _files(folder))}
    return sorted(runs.values(), key=lambda run: (run.date, run.run_id))


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))


def _write(path: Path, run: HistoryRun) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    shared = {
        "run_id": run.run_id,
        "date": run.date,
        "commit": run.commit,
        "name": run.name,
        "series": json.dumps(run.series, sort_keys=True),
        "set_aside": run.set_aside,
    }
    columns = {key: [value] * len(run.values) for key, value in shared.items()}
    types = [pa.field(name, pa.string()) for name in COLUMNS[:-1]]
    table = pa.table(
        {**columns, "metric": list(run.values), "value": list(run.values.values())},
        schema=pa.schema([*types, pa.field("value", pa.float64())]),
    )
    with atomic_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")


def _read(path: Path) -> HistoryRun:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path} is damaged ({error}): remove it, and add its run again") from error
    if set(COLUMNS) - set(table.column_names) or not table.num_rows:
        raise BadInput(f"{path} is no run of a history: remove it from the folder")
    return _run_of(table)


def _run_of(table: pa.Table) -> HistoryRun:
    first = table.slice(0, 1).to_pylist()[0]
    values = dict(zip(table["metric"].to_pylist(), table["value"].to_pylist(), strict=True))
    shared = {key: first[key] for key in COLUMNS if key not in ("series", "metric", "value")}
    return HistoryRun(**shared, series=json.loads(first["series"]), values=values)
