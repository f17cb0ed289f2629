"""`llmopt run`: run a YAML recipe end to end, with one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from ..base.option import option
from .options.command import with_options
from .options.shared import FolderOptions, JobOptions, Json

if TYPE_CHECKING:
    from rich.table import Table

    from ..base.progress import Progress
    from ..bench.studies.recipe import Recipe
    from ..bench.studies.recipe_files import Stages


@dataclass(frozen=True, slots=True)
class RunJobOptions(JobOptions):
    """Who does the jobs of a recipe, and what each of them is."""

    PANEL: ClassVar = "Jobs"

    job: str | None = option(None, "With --resume: do this job of --status alone.")
    status: bool = option(False, "With --resume: list the jobs; do nothing.", flag="--status")

    def check(self, resume: Path | None) -> None:
        """Check them against each other. Raises `BadInput`: several ask for different things, or one is of a
        run that began, or of a new one."""
        from ..base.errors import BadInput

        asked = {
            "--on": self.on is not None,
            "--job": self.job is not None,
            "--status": self.status,
        }
        given = [flag for flag, is_given in asked.items() if is_given]
        if len(given) > 1:
            raise BadInput(f"{given[0]} and {given[1]} ask for different things: give one")
        if resume is None and (self.job is not None or self.status):
            raise BadInput(f"{given[0]} is of a run that began: give its folder with --resume")
        if resume is not None and self.score_shares is not None:
            raise BadInput("--score-shares is of a new run: omit it with --resume")


@with_options
def run(
    *,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, or a bundled recipe: quickstart, choose, method-shootout, ci-regression or "
            "capacity."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the recipe in this run folder, from the first unfinished stage."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model in place of the recipe's: a folder, a name, a hub id."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="A value in place of the recipe's, such as bench.num_prompts=200 or "
            "variants.awq.quantize.bits=8; repeatable.",
        ),
    ] = None,
    folder: FolderOptions,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of recipes; do nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print its steps; do nothing.")
    ] = False,
    jobs: RunJobOptions,
    as_json: Json = False,
) -> None:
    """Run a recipe: bench, quantize, verify, bench again, compare, report."""
    if schema:
        _print_schema()
        return
    _check_of_new_runs(folder, resume, model, changes)
    jobs.check(resume)
    if not (dry_run or jobs.status):
        _check_writable(folder, resume)
    stages, steps = _wanted(recipe, resume, model, changes or ())
    if dry_run:
        _show_steps(steps, as_json)
    elif jobs.status and stages is not None:
        _show_status(stages, as_json)
    else:
        _check_models(steps)  # before torch is imported
        _do_jobs(stages, steps, folder, jobs, as_json)


def _check_of_new_runs(
    folder: FolderOptions, resume: Path | None, model: str | None, changes: Sequence[str] | None
) -> None:
    from ..base.errors import BadInput

    if resume is not None and folder.output is not None:
        raise BadInput("--output names the folder of a new run: omit it with --resume")
    if resume is not None and (model is not None or changes):
        raise BadInput("--model and --set are of a new run: omit them with --resume")


def _do_jobs(
    stages: Stages | None, recipe: Recipe, folder: FolderOptions, jobs: RunJobOptions, as_json: bool
) -> None:
    from ..bench.studies.jobs import check_jobs
    from ..bench.studies.recipe_files import Stages

    on_ray = jobs.is_on_ray
    if on_ray or jobs.score_shares:
        check_jobs(recipe)
    stages = stages or Stages.begin(folder.folder(recipe.name), recipe, jobs.score_shares or 1)
    if jobs.job is not None:
        _do_job(stages, jobs.job)
    else:
        _run(stages, as_json, on_ray=on_ray)


def _do_job(stages: Stages, job: str) -> None:
    from ..bench.studies.recipe_run import do_named_job
    from .output.console import TerminalProgress

    again = f"interrupted: go on with `llmopt run --resume {stages.folder} --job '{job}'`"
    with TerminalProgress(lambda: again) as progress:
        do_named_job(stages, job, progress)


def _show_status(stages: Stages, as_json: bool) -> None:
    from ..bench.studies.jobs import job_states
    from .output.console import result_console

    rows = job_states(stages)
    out = result_console(as_json, {"folder": str(stages.folder), "jobs": rows})
    out.print(_table(stages.recipe.name, list(rows[0]), [list(row.values()) for row in rows]))


def _run(stages: Stages, as_json: bool, *, on_ray: bool) -> None:
    """Carry out what is left of a recipe, and end with its exit code."""
    from .output.console import TerminalProgress, result_console, say

    resumes = f"interrupted: resume with `llmopt run --resume {stages.folder}`"
    with TerminalProgress(lambda: resumes) as progress:
        done = _carry_out(stages, progress, on_ray=on_ray)
    out = result_console(as_json, {"folder": str(stages.folder), **done.record})
    out.print(done.table)
    for line in done.lines:
        out.print(line)
    say(f"Report: {stages.folder / 'report.html'}", out)
    if done.record["exit_code"]:
        raise typer.Exit(done.record["exit_code"])


def _print_schema() -> None:
    import json

    from ..bench.studies.recipe import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


def _check_models(recipe: Recipe) -> None:
    """Raises `BadInput` for a model that is not there, other than those of running servers."""
    from ..bench.load.started_server import preset
    from ..bench.studies.recipe import bench_of
    from ..quant.source.models import is_local, resolve_model

    for variant in (None, *recipe.variants):
        options = bench_of(recipe, variant)
        if options.serve is not None:
            preset(options.serve).find(options.serve, options.serve_program)
        if options.base_url is None and (options.serve is None or is_local(options.model or "")):
            resolve_model(options.model)


def _check_writable(folder: FolderOptions, resume: Path | None) -> None:
    from ..base.atomic_io import check_output

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


def _wanted(
    recipe: str | None, resume: Path | None, model: str | None, changes: Sequence[str]
) -> tuple[Stages | None, Recipe]:
    """(the stage journal to resume, the recipe)."""
    from ..base.errors import BadInput
    from ..bench.studies.recipe_files import Stages, read_recipe

    if recipe is not None and resume is None:
        return None, read_recipe(recipe, model, changes)
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


def _carry_out(stages: Stages, progress: Progress, *, on_ray: bool) -> _Done:
    if stages.recipe.capacity is not None:
        return _capacity(stages, progress)
    from ..bench.studies.recipe_page import HEADER, gate_sentence, recipe_verdict, verdict_rows
    from ..bench.studies.recipe_run import run_recipe

    run = run_recipe(stages, progress, on_ray=on_ray)
    # The report has all columns; 80 columns fit only these.
    shown = [number for number, heading in enumerate(HEADER) if heading not in ("TTFT", "overall")]
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
