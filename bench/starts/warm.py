"""Warm passes of a start: leading passes are discarded until two in succession agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..record.run_data import RunData

AGREEMENT = 0.03
# At most this fraction of the passes is discarded.
MAX_DISCARDED = 0.5


def num_cold(passes: Sequence[Mapping[str, Any]]) -> int:
    """How many leading passes are discarded: those before the first two whose CPU time, or wall time where
    that is unknown, differs by at most 3 %; never more than half of the passes."""
    most = int(len(passes) * MAX_DISCARDED)
    for number in range(most):
        times = [one.get("cpu_seconds") or one["duration"] for one in passes[number : number + 2]]
        if max(times) <= min(times) * (1 + AGREEMENT):
            return number
    return most


def warm(start: RunData) -> RunData:
    """The start without its cold passes, in its record and in its table of requests."""
    record = start.result["llmopt"]
    cold = num_cold(record["runs"])
    if not cold:
        return start
    ours = {**record, "runs": record["runs"][cold:], "num_cold_passes": cold}
    table = start.requests
    if table is not None:
        kept = [row for row, number in enumerate(table["run"]) if number >= cold]
        table = {key: [column[row] for row in kept] for key, column in table.items()}
        table["run"] = [number - cold for number in table["run"]]
    return replace(start, result={**start.result, "llmopt": ours}, requests=table)
