"""CSV of runs for Apache Otava, which finds change points in a series (docs/commands/report.md).

Otava's CSV importer wants a header, a column with the time, and a number in every cell of a metric. So a row
is a run, and a metric that one of the runs lacks has no column.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ...base.atomic_io import write_atomically
from ...base.errors import BadInput
from ..gate.limits import COUNTED, MEASURED, scores_in
from ..quality.summary import score_of
from ..record.comparable import series_identity
from ..record.result import read_result

MAX_OTHER_LOAD = 0.25
"""Share of the CPUs that other processes may use during a pass that counts."""


def write_otava(csv_path: Path, paths: Sequence[Path]) -> list[str]:
    """Write a row for each sound run, oldest first; returns a sentence for each run that was left out.
    `paths`: run folders or `result.json` files. A run that is given twice has one row. Raises BadInput: no
    sound run, runs of several series, a run without a date, or an incomplete result."""
    rows, omitted, series = {}, [], {}
    for path in paths:
        result = read_result(path)
        try:
            if reason := _unsound(result):
                omitted.append(f"{path} was left out: {reason}")
                continue
            record = result["llmopt"]
            series[path] = series_identity(record["identity"])
            try:
                time = datetime.strptime(str(result["date"]), "%Y%m%d-%H%M%S").isoformat()
            except ValueError as error:
                raise BadInput(f"{path} does not say when it was measured") from error
            commit = record["environment"].get("commit") or "unknown"
            row = {"time": time, "commit": commit, "name": record["name"]}
            run_id = record["run_id"]
            rows[run_id] = {**row, "run_id": run_id, **_metric_values(result)}
        except (KeyError, TypeError) as error:
            raise BadInput(f"{path} is no whole result of llmopt bench: {error}") from error
    if not rows:
        raise BadInput("no run to export: " + "; ".join(omitted))
    _check_one_series(series)
    ordered = sorted(rows.values(), key=lambda row: row["time"])
    metrics = [key for key in ordered[0] if all(key in row for row in ordered)]
    text = io.StringIO()
    table = csv.DictWriter(text, metrics, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(ordered)
    write_atomically(csv_path, text.getvalue())
    return omitted


def _unsound(result: Mapping[str, Any]) -> str | None:
    """Reason why a run's speed says nothing about its commit; None for a sound run."""
    record = result["llmopt"]
    if record["interrupted"]:
        return "it was interrupted"
    if result["failed"]:
        return f"{result['failed']} of its requests failed"
    if not record["runs"]:
        return "it measured no speed"
    if (client := record.get("client")) and not client["certified"]:
        return f"its client was not certified: {client['reasons'][0]}"
    if not _quiet_passes(record):
        return f"other processes used more than {MAX_OTHER_LOAD:.0%} of the CPUs in every pass"
    return None


def _quiet_passes(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [run for run in record["runs"] if (run.get("other_load") or 0.0) <= MAX_OTHER_LOAD]


def _metric_values(result: Mapping[str, Any]) -> dict[str, float]:
    """Every metric of the gate that the result has; geometric means over the undisturbed passes."""
    values: dict[str, float] = {}
    for key in MEASURED:
        passes = [run[key] for run in _quiet_passes(result["llmopt"]) if run.get(key)]
        if passes:
            values[key] = math.exp(sum(map(math.log, passes)) / len(passes))
    for key, counted in COUNTED.items():
        try:
            value = counted.read(result)
        except (KeyError, TypeError):
            continue
        if value is not None:
            values[key] = float(value)
    quality = result["llmopt"]["quality"] or {}
    for scored in scores_in(quality):
        if (score := score_of(quality, scored.name)) is not None:
            values[scored.key] = float(score[0])
    return values


def _check_one_series(series: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises BadInput for runs that differ in more than speed: another model, load or machine."""
    (first, expected), *others = series.items()
    for path, identity in others:
        if differing := [
            key for key in {**expected, **identity} if expected.get(key) != identity.get(key)
        ]:
            raise BadInput(
                f"{first} and {path} differ in {', '.join(differing)}: export each series to a file "
                "of its own"
            )
