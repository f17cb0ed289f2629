"""Runs of a history: what it keeps of a result, and the store with one Parquet file per run.

A file is written under a temporary name, renamed, and never changed, so writers need no lock: two of them
write two files, or the same one twice. A killed writer leaves a hidden partial file, which nothing reads.
Histories merge by copying their files together.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quant.base.errors import BadInput
from ..gate.limits import COUNTED, MEASURED, SCORED
from ..quality.summary import score_of
from ..record.comparable import series_identity
from ..record.imported import UNKNOWN
from ..record.result import atomic_file, read_result

if TYPE_CHECKING:
    import pyarrow as pa


MAX_OTHER_LOAD = 0.25
MIN_REQUESTS = 8
UNKNOWN_COMMIT = "unknown"
DATE = re.compile(r"\d{8}-\d{6}")
RUN_ID = re.compile(r"[0-9A-Za-z-]{8,}")


@dataclass(frozen=True, slots=True)
class HistoryRun:
    """One run of a history.

    Attributes:
        date: of the measurement, `YYYYmmdd-HHMMSS`; orders the series.
        series: the identity that all runs of a series share.
        set_aside: why the run is shown but not analysed; None where it is.
        values: {metric of the gate: value}, a geometric mean over the passes where each has one.
    """

    run_id: str
    date: str
    commit: str
    name: str
    series: Mapping[str, Any]
    set_aside: str | None
    values: Mapping[str, float]

    @property
    def day(self) -> str:
        """The date as YYYY-mm-dd."""
        return f"{self.date[:4]}-{self.date[4:6]}-{self.date[6:8]}"

    @property
    def series_id(self) -> str:
        """A short hash of the series' identity."""
        text = json.dumps(self.series, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @classmethod
    def of_result(
        cls,
        result: Mapping[str, Any],
        *,
        commit: str | None = None,
        date: str | None = None,
        max_other_load: float = MAX_OTHER_LOAD,
    ) -> HistoryRun:
        """The run of a `result.json`; `commit` and `date` replace the recorded ones.

        `max_other_load`: passes during which other processes used more of the CPUs than this are left out.

        Raises:
            KeyError, ValueError: a key of a result is missing or malformed.
        """
        record = result["llmopt"]
        # Those during which other processes left the machine to the run.
        passes = [
            each for each in record["runs"] if (each.get("other_load") or 0.0) <= max_other_load
        ]
        when = date or str(result["date"])
        if not DATE.fullmatch(when) or not RUN_ID.fullmatch(record["run_id"]):
            raise ValueError(f"no date or run id: {when!r}, {record['run_id']!r}")
        return cls(
            run_id=record["run_id"],
            date=when,
            commit=commit or record["environment"].get("commit") or UNKNOWN_COMMIT,
            name=record["name"],
            series=series_identity(record["identity"]),
            set_aside=set_aside_because(result, len(passes), max_other_load),
            values=metric_values(result, passes or record["runs"]),
        )


def set_aside_because(
    result: Mapping[str, Any], num_quiet_passes: int, max_other_load: float
) -> str | None:
    """Why a run's speed says nothing about its commit; None for a sound run."""
    record = result["llmopt"]
    if record["interrupted"]:
        return "it was interrupted"
    if result["failed"]:
        return f"{result['failed']} of its requests failed"
    if not record["runs"]:
        return "it measured no speed"
    if result["completed"] is not None and result["completed"] < MIN_REQUESTS:
        return f"it has {result['completed']} requests only"
    if (client := record.get("client")) and not client["certified"]:
        return f"its client was not certified: {client['reasons'][0]}"
    if not num_quiet_passes:
        return f"other processes used more than {max_other_load:.0%} of the CPUs in every pass"
    return None


def metric_values(
    result: Mapping[str, Any], passes: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The value of every metric that the result has."""
    values: dict[str, float] = {}
    for key in MEASURED:
        by_pass = [each[key] for each in passes if each.get(key)]
        if by_pass:
            values[key] = math.exp(sum(map(math.log, by_pass)) / len(by_pass))
    for key, counted in COUNTED.items():
        try:
            value = counted.read(result)
        except (KeyError, TypeError):
            continue
        if value is not None:
            values[key] = float(value)
    quality = result["llmopt"]["quality"] or {}
    for key, scored in SCORED.items():
        if (found := score_of(quality, scored.name)) is not None:
            values[key] = float(found[0])
    return values


def runs_of_results(
    paths: Sequence[Path],
    *,
    commit: str | None = None,
    date: str | None = None,
    max_other_load: float = MAX_OTHER_LOAD,
) -> list[HistoryRun]:
    """The runs of run folders or `result.json` files; `commit` and `date` replace the recorded ones.

    Raises:
        BadInput: no result there, an incomplete one, or a date that is none.
    """
    stamp = None if date is None else _stamp(date)
    if commit is not None and not commit.strip():
        raise BadInput("--commit is empty: give the commit that was measured, or leave it away")
    runs = []
    for path in paths:
        result = read_result(path)
        if stamp is None and result["date"] == UNKNOWN:
            raise BadInput(f"{path} does not say when it was measured: give --date")
        try:
            run = HistoryRun.of_result(
                result, commit=commit, date=stamp, max_other_load=max_other_load
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{path} is no whole result of llmopt bench: {error}") from error
        runs.append(run)
    return runs


def _stamp(date: str) -> str:
    try:
        return datetime.fromisoformat(date).strftime("%Y%m%d-%H%M%S")
    except ValueError as error:
        raise BadInput(f"--date {date!r}: write a time such as 2026-11-22T10:00:00") from error


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
