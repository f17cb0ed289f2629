"""Terminal output of a history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ...bench.history.series import Series


def print_series(series: Sequence[Series], out: Console) -> None:
    """A line for each series, and below it its change points."""
    from ...bench.history.page import history_verdict
    from ...bench.page.page import number, percent

    for each in series:
        runs, aside = len(each.runs), len(each.runs) - len(each.analysed)
        said = f"{each.metric.label} of {each.name}: {runs} run{'' if runs == 1 else 's'}"
        said += f", {aside} set aside" if aside else ""
        if each.levels:
            said += f", now {number(each.levels[-1][2])} {each.metric.unit}"
        out.print(said, markup=False, soft_wrap=True)
        for change in each.changes:
            way = "worse" if change.worse > 0 else "better"
            line = f"  {percent(abs(change.worse))} {way} since {change.where}"
            out.print(line, markup=False, soft_wrap=True)
    verdict = history_verdict(series)
    out.print(f"{verdict.headline} {verdict.sentence}", markup=False, soft_wrap=True)
