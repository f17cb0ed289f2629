"""`llmopt compare`: two runs, or paired starts of two builds in a folder that can be resumed; one verdict."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.atomic_io import check_output, make_folder
from ..base.errors import BadInput
from ..base.option import option
from ..bench.gate.gate_options import LimitOptions
from .options.command import with_options
from .options.shared import StartOptions, VerdictFileOptions

if TYPE_CHECKING:
    from ..bench.gate.compare import Comparison
    from ..bench.studies.starts_plan import StartsPlan


@with_options
def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BASE NEW]",
            help="Two runs, each a folder, its result.json, or a result of another tool. With --run: "
            "`--` and options of bench.",
        ),
    ] = None,
    *,
    limits: LimitOptions,
    plan_runs: str | None = option(
        None,
        "Print how many pairs of runs tell a change of this size, such as 3%, at the noise of the "
        "given runs or at three usual ones, and end.",
        metavar="SHARE",
    ),
    starts: StartOptions,
    files: VerdictFileOptions,
) -> None:
    """Compare two runs, or paired starts of two builds: exit 0 pass, 1 regression, 3 no verdict."""
    from .output.bench_tables import print_comparison
    from .output.console import result_console

    if plan_runs is not None:
        _print_plan(plan_runs, arguments or [], as_json=files.as_json)
        return
    if starts.is_asked_for:
        comparison, record = compare_starts(arguments or (), limits, starts, files)
    else:
        starts.check_absent()
        comparison = _compare_runs(arguments or [], limits, files)
        record = comparison.as_dict()
    if files.summary is not None:
        from ..bench.report.comparison import summary

        with files.summary.open("a", encoding="utf-8") as page:
            page.write(summary(comparison))
    print_comparison(comparison, result_console(files.as_json, record))
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def _compare_runs(paths: list[str], limits: LimitOptions, files: VerdictFileOptions) -> Comparison:
    from ..bench.gate.compare import RunData, compare_by
    from ..bench.gate.outputs import write_outputs

    if len(paths) != 2:
        raise BadInput(
            f"compare takes two runs, base and new, and {len(paths)} were given: see llmopt compare --help"
        )
    limits.check()
    before, after = (RunData.read(Path(path)) for path in paths)
    comparison = compare_by(limits, before, after)
    if files.output is not None or files.markdown is not None:
        from ..bench.report.comparison import comparison_page

        page = comparison_page(before, after, comparison)
        page.write(files.output, files.markdown)
    write_outputs(after, comparison, files.junit, files.benchmark_json)
    return comparison


def _print_plan(text: str, paths: list[str], *, as_json: bool) -> None:
    """Print the pairs of runs that tell a change of this size, by the noise of a run."""
    from ..bench.gate.compare import RunData, noise_of_runs
    from ..bench.gate.limits import parse_share
    from ..bench.gate.verdict import planned_pairs
    from .output.bench_tables import plain_table
    from .output.console import result_console

    share = parse_share(text)
    noises = noise_of_runs([RunData.read(Path(path)) for path in paths])
    plans = {name: (noise, planned_pairs(noise, share)) for name, noise in noises.items()}
    record = {name: {"run_cv": noise, "pairs": pairs} for name, (noise, pairs) in plans.items()}
    out = result_console(as_json, {"change": share, "noise": record})
    rows = [
        (name, f"{noise:.1%}", *((f"{pairs}", f"{2 * pairs}") if pairs else ("over 240", "")))
        for name, (noise, pairs) in plans.items()
    ]
    title = f"Runs that tell {share:.1%}"
    out.print(plain_table(("noise of a run", "CV", "pairs", "runs"), rows, title=title))
    out.print(
        f"A limit of {share:.1%} then passes an equal build, and finds one that is {2 * share:.1%} worse, "
        "each with a chance of 80 %."
    )


def compare_starts(
    bench_options: Sequence[str],
    limits: LimitOptions,
    starts: StartOptions,
    files: VerdictFileOptions,
) -> tuple[Comparison, dict[str, Any]]:
    """(the comparison, its record), with the files of the comparison written. Raises `BadInput`: options that
    contradict each other, or a base that cannot be measured; `typer.Exit`: 130 after Ctrl-C."""
    from ..base.atomic_io import is_taken
    from ..bench.gate.outputs import write_outputs
    from ..bench.record.result import stamped
    from ..bench.studies.starts_series import PairedSeries, pooled, write_comparison
    from .output.console import TerminalProgress, result_console, say

    plan = _planned(bench_options, limits, starts, files)
    again = "interrupted: the finished starts are in {0}; go on with `llmopt compare --resume {0}`"
    progress = TerminalProgress(lambda: again.format(folder))
    # A plan that cannot be carried out leaves no folder.
    series = PairedSeries(plan, starts.resume or Path(), progress)
    folder = starts.resume or files.output
    if folder is None:
        folder = stamped(Path("runs"), f"{plan.new.name}-against-{plan.base.name}")
    if starts.resume is None:
        if is_taken(folder):
            raise BadInput(
                f"{folder} exists: name another folder, or go on in it with --resume {folder}"
            )
        make_folder(folder, "--output")
        plan.write(folder)
    series.folder = folder
    # A job that is cancelled must not leave its starts running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with progress:
        finished = series.run()
    record, page = write_comparison(finished, folder)
    page.write(markdown=files.markdown)
    new = pooled(finished.new) if finished.new else None
    write_outputs(new, finished.comparison, files.junit, files.benchmark_json)
    say(
        f"Comparison: {folder / 'comparison.html'} ({finished.comparison.num_pairs} pairs of starts; "
        f"{finished.stopped_because})",
        result_console(files.as_json),
    )
    return finished.comparison, record


def _planned(
    bench_options: Sequence[str],
    limits: LimitOptions,
    starts: StartOptions,
    files: VerdictFileOptions,
) -> StartsPlan:
    from ..bench.studies.starts_plan import Budget, StartsPlan, can_interleave, parse_builds

    given = {"max_starts": starts.max_starts, "max_minutes": starts.max_minutes}
    budget = {key: value for key, value in given.items() if value is not None}
    if starts.resume is not None:
        changed = (starts.run, starts.max_starts, starts.pin_cpus, starts.interleave, files.output)
        if bench_options or any(value is not None for value in changed):
            raise BadInput(
                "--resume goes on as it began: of its options only --max-minutes may be given anew"
            )
        check_output(starts.resume, "--resume", folder=True)
        plan = StartsPlan.read(starts.resume)
        return replace(plan, budget=replace(plan.budget, **budget))
    base, new = parse_builds(starts.run or ())
    plan = StartsPlan(
        base, new, tuple(bench_options), limits, Budget(**budget), starts.pin_cpus or "auto"
    )
    check_output(files.output or Path("runs", "run"), "--output", folder=True)
    interleave = can_interleave(plan) if starts.interleave is None else starts.interleave
    return replace(plan, interleave=interleave)
