"""`llmopt bench` over a grid of server flags and benchmark options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.grid.plan import GridPlan
    from ..bench.record.tracking import Tracker
    from .options.measuring import GridOptions
    from .options.shared import ResultOptions

DRY_PORT = 8000


def run_bench_grid(
    given: Mapping[str, Any],
    grid: GridOptions,
    result: ResultOptions,
    trackers: Sequence[Tracker],
) -> None:
    """Run or continue a grid, write its folder, print its table.

    Raises:
        BadInput: an option or a parameter file is invalid, or the folder is of something else.
    """
    from ..bench.grid.cells import open_grid, parse_axes, run_grid
    from ..bench.grid.page import write_grid
    from ..bench.grid.plan import plan_grid
    from ..bench.record.tracking import of_result
    from ..quant.base.atomic_io import interrupts_held
    from .output.console import TerminalProgress, emit_json, people, result_console
    from .output.tracking import track

    axes = parse_axes(grid.pareto)
    plan = plan_grid(given, grid.serve_params, grid.bench_params, grid.link_vars)
    if grid.dry_run:
        for line in commands(plan):
            print(line)
        return
    folder = result.folder(plan.name)
    open_grid(plan, folder)
    progress = TerminalProgress()
    try:
        is_whole = run_grid(
            plan,
            folder,
            progress,
            after_cell=lambda _, run, cell: track(trackers, of_result(run.result, cell)),
            refresh=lambda: write_grid(plan, folder, axes),
        )
    finally:
        progress.finish()
    with interrupts_held():
        record = write_grid(plan, folder, axes)
    if result.as_json:
        emit_json(record)
    out = result_console(result.as_json)
    _show(record, out)
    if not is_whole:
        people.print(
            f"interrupted: finished cells are in {folder}; the same line with --output {folder} goes on",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(130)
    out.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    if any(row["status"] != "done" for row in record["cells"]):
        raise typer.Exit(1)


def commands(plan: GridPlan) -> list[str]:
    """The command lines of a grid: each server's, and below it its benchmarks'."""
    from ..bench.grid.plan import bench_words, changed_fields
    from ..bench.load.started_server import dry_command

    lines = []
    for row in plan.rows():
        options = row[0].options
        target = [] if options.model is None else ["--model", options.model]
        if options.serve is not None:
            lines.append(shlex.join(dry_command(options, DRY_PORT)))
            target = ["--base-url", f"http://127.0.0.1:{DRY_PORT}"]
        elif options.base_url is not None:
            target = ["--base-url", options.base_url]
        for cell in row:
            words = ["llmopt", "bench", *target, *bench_words(changed_fields(cell.options))]
            lines.append(("    " if options.serve is not None else "") + shlex.join(words))
    return lines


def _show(record: Mapping[str, Any], out: Console) -> None:
    from ..bench.grid.page import console_table, grid_verdict
    from .output.bench_tables import print_table

    print_table(console_table(record), out)
    verdict = grid_verdict(record)
    out.print(f"{verdict.headline} {verdict.sentence}", markup=False, soft_wrap=True)
