"""`llmopt run`: run a YAML recipe end to end, with one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options.command import with_options
from .options.shared import FolderOptions, Json

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.studies.recipe import Recipe, Stages
    from ..quant.base.progress import Progress


@with_options
def run(
    *,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, or a bundled recipe: quickstart, method-shootout, ci-regression or capacity."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the recipe in this run folder, from the first unfinished stage."),
    ] = None,
    folder: FolderOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print its steps; do nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe: bench, quantize, verify, bench again, compare, report."""
    from ..quant.base.errors import BadInput
    from ..quant.models import resolve_model

    if resume is not None and folder.output is not None:
        raise BadInput("--output names the folder of a new run: omit it with --resume")
    if not dry_run:
        _check_writable(folder, resume)
    stages, steps = _wanted(recipe, resume)
    if dry_run:
        _show_steps(steps, as_json)
        return
    resolve_model(steps.model)  # before torch is imported

    from ..bench.studies.recipe import Stages
    from .output.console import TerminalProgress, result_console, say

    stages = stages or Stages.begin(folder.folder(steps.name), steps)
    resumes = f"interrupted: resume with `llmopt run --resume {stages.folder}`"
    with TerminalProgress(lambda: resumes) as progress:
        done = _carry_out(stages, progress)
    out = result_console(as_json, {"folder": str(stages.folder), **done.record})
    out.print(done.table)
    for line in done.lines:
        out.print(line, markup=False)
    say(f"Report: {stages.folder / 'report.html'}", out)
    if done.record["exit_code"]:
        raise typer.Exit(done.record["exit_code"])


def _check_writable(folder: FolderOptions, resume: Path | None) -> None:
    from ..quant.base.atomic_io import check_output

    if resume is None:
        folder.check()
    else:
        check_output(resume, "--resume", folder=True)


def _show_steps(recipe: Recipe, as_json: bool) -> None:
    from ..bench.studies.recipe import steps_of
    from .output.console import result_console, say

    steps = steps_of(recipe)
    out = result_console(as_json, {"name": recipe.name, "steps": steps})
    for number, line in enumerate(steps, 1):
        say(f"{number}. {line}", out)


def _wanted(recipe: str | None, resume: Path | None) -> tuple[Stages | None, Recipe]:
    """(the stage journal to resume, the recipe)."""
    from ..bench.studies.recipe import Stages, read_recipe
    from ..quant.base.errors import BadInput

    if recipe is not None and resume is None:
        return None, read_recipe(recipe)
    if resume is not None and recipe is None:
        stages = Stages.resume(resume)
        return stages, stages.recipe
    raise BadInput("give a recipe to run, or --resume FOLDER to resume one")


@dataclass(frozen=True, slots=True)
class _Done:
    """Terminal output of a finished recipe."""

    record: Mapping[str, Any]
    table: Table
    lines: tuple[str, ...]


def _carry_out(stages: Stages, progress: Progress) -> _Done:
    if stages.recipe.capacity is not None:
        return _capacity(stages, progress)
    from ..bench.studies.recipe_page import HEADER, gate_sentence, recipe_verdict, verdict_rows
    from ..bench.studies.recipe_run import run_recipe

    run = run_recipe(stages, progress)
    # The report has all columns; 80 columns fit only these.
    shown = [number for number, heading in enumerate(HEADER) if heading != "TTFT"]
    rows = [[row[number] for number in shown] for row in verdict_rows(run)]
    verdict = recipe_verdict(run)
    return _Done(
        run.record(),
        _table(stages.recipe.name, [HEADER[number] for number in shown], rows),
        (f"{verdict.headline} {verdict.sentence}", gate_sentence(run)),
    )


def _capacity(stages: Stages, progress: Progress) -> _Done:
    from ..bench.report.parts import write_page
    from ..bench.studies.recipe_page import capacity_page, capacity_table, capacity_verdict
    from ..bench.studies.recipe_run import run_capacity

    run = run_capacity(stages, progress)
    write_page(capacity_page(run), run.folder)
    table, verdict = capacity_table(run), capacity_verdict(run)
    return _Done(
        run.record,
        _table(stages.recipe.name, table.header, table.rows),
        (f"{verdict.headline} {verdict.sentence}",),
    )


def _table(name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from .output.bench_tables import plain_table

    table = plain_table(header, rows, title=name, no_wrap=range(1, len(header)))
    table.columns[0].min_width, table.columns[0].overflow = 8, "fold"
    return table
