"""Reading results into the runs of a history, all of them before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ...quant.base.errors import BadInput
from ..record.result import read_result
from .run import MAX_OTHER_LOAD, HistoryRun


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
