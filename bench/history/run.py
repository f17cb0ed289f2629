"""A run as a history keeps it: when, which commit, which series, and one value of each metric."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..gate.gate import COUNTED, MEASURED
from ..gate.scored import SCORED
from ..record.comparable import series_identity

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
        passes = quiet_passes(record["runs"], max_other_load)
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


def quiet_passes(
    passes: Sequence[Mapping[str, Any]], max_other_load: float
) -> list[Mapping[str, Any]]:
    """The passes during which other processes left the machine to the run."""
    return [each for each in passes if (each.get("other_load") or 0.0) <= max_other_load]


def set_aside_because(
    result: Mapping[str, Any], num_quiet_passes: int, max_other_load: float
) -> str | None:
    """Why a run's speed says nothing about its commit; None for a sound run."""
    record = result["llmopt"]
    if record["interrupted"]:
        return "it was interrupted"
    if result["failed"]:
        return f"{result['failed']} of its requests failed"
    if result["completed"] < MIN_REQUESTS:
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
        if quality.get(scored.name) is not None:
            values[key] = float(quality[scored.name])
    return values
