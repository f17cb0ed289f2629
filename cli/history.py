"""`llmopt history`: a folder of runs, their change points, and a verdict on the newest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..quant.base.option import option
from .options.command import output_to, with_options, writable
from .options.shared import Json
from .output.help_screen import App

if TYPE_CHECKING:
    from ..bench.studies.history_runs import HistoryRun

_SINCE = "Leave out the runs before the first one of this commit, such as a release's."
Since = Annotated[str | None, typer.Option(help=_SINCE)]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The history's folder.")]


@dataclass(frozen=True, slots=True)
class HistoryLimitOptions:
    """The limits of a check."""

    threshold: str = option(
        "5%", "How much of a speed may be lost: 5% or 0.05. Small losses add up."
    )
    gate: str | None = option(
        None,
        'Limits instead of --threshold, such as "median_tpot_ms<=+3% output_throughput>=-3% '
        'perplexity<=+1%".',
    )
    window: int = option(20, "Newest runs in which a change point counts.", span=(3, None))
    since: str | None = option(None, _SINCE)


history = App(
    no_args_is_help=False,
    help="Keep a history of runs, and find the commits that changed their speed.",
)


@history.command()
def add(
    folder: Folder,
    runs: Annotated[list[Path], typer.Argument(help="Run folders or result.json files.")],
    commit: Annotated[
        str | None, typer.Option(help="Commit that was measured. Default: the one in the record.")
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(
            help="Where the runs belong in the series, such as the commit's 2026-11-22T10:00:00. Default: "
            "when they were made."
        ),
    ] = None,
    max_other_load: Annotated[
        str,
        typer.Option(
            help="Leave out passes during which other processes used more of the CPUs than this: 25% or "
            "0.25. A run without any other pass is set aside."
        ),
    ] = "25%",
    as_json: Json = False,
) -> None:
    """Add runs; a run that is there already is left as it is."""
    from ..bench.gate.limits import parse_share
    from ..bench.studies.history_runs import add_runs, runs_of_results, short_id
    from ..quant.base.atomic_io import check_output
    from .output.console import result_console, say

    share = parse_share(max_other_load)
    check_output(folder, "FOLDER", folder=True)
    given = runs_of_results(runs, commit=commit, date=date, max_other_load=share)
    added = add_runs(folder, given)
    record = {"added": [run.run_id for run in added], "given": len(given)}
    out = result_console(as_json, record)
    for run in added:
        aside = f", set aside: {run.set_aside}" if run.set_aside else ""
        say(f"{short_id(run)}: {run.name}, commit {run.commit}, series {run.series_id}{aside}", out)
    there = len(given) - len(added)
    left = f" ({there} of {len(given)} there already)" if there else ""
    what = "1 run" if len(added) == 1 else f"{len(added)} runs"
    say(f"{what} added to {folder}{left}", out)


@history.command()
def show(
    folder: Folder,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric of the gate, such as p99_ttft_ms; repeatable. Default: four speeds."
        ),
    ] = None,
    since: Since = None,
    output: Annotated[Path | None, output_to("Write the page to this HTML file.")] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the tables as Markdown to this file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the series with their change points and the commits of these."""
    from ..bench.gate.limits import quantity
    from ..bench.metrics.run_statistics import HEADLINES
    from ..bench.studies.history_series import history_page, series_dict, series_of
    from .output.bench_tables import print_series
    from .output.console import result_console, say

    metrics = [quantity(name) for name in metric or HEADLINES]
    runs = _runs_since(folder, since)
    series = [each for key in metrics for each in series_of(runs, key)]
    history_page(series).write(output, markdown)
    out = result_console(as_json, [series_dict(each) for each in series])
    print_series(series, out)
    if output is not None:
        say(f"Page: {output}", out)


@history.command()
@with_options
def check(folder: Folder, limits: HistoryLimitOptions, as_json: Json = False) -> None:
    """Exit 1 if the newest runs hold a change for the worse, 0 if not, 3 without a verdict."""
    from ..bench.gate.limits import parse_share
    from ..bench.studies.history_check import check_history, history_limits
    from .output.console import result_console, say

    bounds = history_limits(limits.gate, parse_share(limits.threshold))
    verdict = check_history(_runs_since(folder, limits.since), bounds, window=limits.window)
    out = result_console(as_json, verdict.as_dict())
    for note in verdict.notes:
        say(f"note: {note}", out)
    say(f"{verdict.outcome.value.upper()}: {verdict.sentence}", out)
    if verdict.outcome.exit_code:
        raise typer.Exit(verdict.outcome.exit_code)


def _runs_since(folder: Path, since: str | None) -> list[HistoryRun]:
    """The runs of a history, from the first one of commit `since` on.

    Raises:
        BadInput: no history there, an empty one, or no such commit.
    """
    from ..bench.studies.history_runs import read_runs
    from ..quant.base.errors import BadInput

    runs = read_runs(folder)
    if not runs:
        raise BadInput(f"{folder} has no runs: llmopt history add puts them there")
    if since is None:
        return runs
    first = next((i for i, run in enumerate(runs) if run.commit.startswith(since)), None)
    if first is None:
        raise BadInput(f"--since {since}: no run in {folder} is of that commit")
    return runs[first:]
