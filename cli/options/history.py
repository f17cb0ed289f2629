"""`llmopt history`: which runs and metrics, and how large a loss is a regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from ...bench.history.runs import HistoryRun

Since = Annotated[
    str | None,
    typer.Option(
        help="Leave out the runs before the first one of this commit, such as a release's."
    ),
]


@dataclass(frozen=True, slots=True)
class HistoryLimitOptions:
    """The limits of a check."""

    threshold: Annotated[
        str,
        typer.Option(help="How much of a speed may be lost: 5% or 0.05. Small losses add up."),
    ] = "5%"
    gate: Annotated[
        str | None,
        typer.Option(
            help='Limits instead of --threshold, such as "median_tpot_ms<=+3% output_throughput>=-3% '
            'perplexity<=+1%".'
        ),
    ] = None
    window: Annotated[
        int, typer.Option(min=3, help="Newest runs in which a change point counts.")
    ] = 20
    since: Since = None


def runs_since(folder: Path, since: str | None) -> list[HistoryRun]:
    """The runs of a history, from the first one of commit `since` on.

    Raises:
        BadInput: no history there, an empty one, or no such commit.
    """
    from ...bench.history.runs import read_runs
    from ...quant.base.errors import BadInput

    runs = read_runs(folder)
    if not runs:
        raise BadInput(f"{folder} has no runs: llmopt history add puts them there")
    if since is None:
        return runs
    first = next((i for i, run in enumerate(runs) if run.commit.startswith(since)), None)
    if first is None:
        raise BadInput(f"--since {since}: no run in {folder} is of that commit")
    return runs[first:]
