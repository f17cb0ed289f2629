"""`llmopt run`: run a YAML recipe end to end, with one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.atomic_io import check_output
from ..base.errors import BadInput
from ..base.option import option
from .options.command import with_options
from .options.shared import FolderOptions, json_option

if TYPE_CHECKING:
    from ..base.progress import Progress
    from ..bench.studies.recipe import Recipe
    from ..bench.studies.recipe_files import Stages


@with_options
def run(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, or a bundled recipe: quickstart, choose, method-shootout, ci-regression or "
            "capacity."
        ),
    ] = None,
    resume: Path | None = option(
        None, "Resume the recipe in this run folder, from the first unfinished stage."
    ),
    model: str | None = option(
        None, "A model in place of the recipe's: a folder, a name, a hub id."
    ),
    changes: list[str] | None = option(
        None,
        "A value in place of the recipe's, such as bench.num_prompts=200 or "
        "variants.awq.quantize.bits=8; repeatable.",
        flag="--set",
        metavar="PATH=VALUE",
    ),
    *,
    folder: FolderOptions,
    schema: bool = option(False, "Print the JSON schema of recipes; do nothing."),
    dry_run: bool = option(False, "Check the recipe and print its steps; do nothing."),
    as_json: bool = json_option(),
) -> None:
    """Run a recipe: bench, quantize, verify, bench again, compare, report."""
    if schema:
        import json

        from ..bench.studies.recipe import Recipe

        typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
        return
    if resume is not None:
        if folder.output is not None:
            raise BadInput("--output names the folder of a new run: omit it with --resume")
        if model is not None or changes:
            raise BadInput("--model and --set are of a new run: omit them with --resume")
        if not dry_run:
            check_output(resume, "--resume", folder=True)
    elif not dry_run:
        folder.check()
    stages, chosen = _wanted(recipe, resume, model, changes or ())
    _check_models(chosen, dry_run)  # before torch is imported
    if not dry_run:
        _do_stages(stages, chosen, folder, as_json)
        return
    from ..bench.studies.recipe import steps_of
    from .output.console import result_console, say

    steps = steps_of(chosen)
    out = result_console(as_json, {"name": chosen.name, "steps": steps})
    for number, line in enumerate(steps, 1):
        say(f"{number}. {line}", out)


def _wanted(
    recipe: str | None, resume: Path | None, model: str | None, changes: Sequence[str]
) -> tuple[Stages | None, Recipe]:
    """(the stage journal to resume, the recipe)."""
    from ..bench.studies.recipe_files import Stages, read_recipe

    if recipe is not None and resume is None:
        return None, read_recipe(recipe, model, changes)
    if resume is not None and recipe is None:
        stages = Stages.resume(resume)
        return stages, stages.recipe
    raise BadInput("give a recipe to run, such as quickstart, or --resume FOLDER to resume one")


def _check_models(recipe: Recipe, dry_run: bool) -> None:
    """Raises `BadInput` for a model or a program of a server that is not there, other than those of running
    servers. A dry run may be of a recipe whose servers are elsewhere."""
    from ..bench.load.started_server import preset
    from ..bench.studies.recipe import bench_of
    from ..quant.source.models import is_local, resolve_model

    for variant in (None, *recipe.variants):
        options = bench_of(recipe, variant)
        if options.serve is not None and not dry_run:
            preset(options.serve).find(options.serve, options.serve_program)
        is_ours = options.serve in (None, "llmopt") or is_local(options.model or "")
        if options.base_url is None and is_ours:
            resolve_model(options.model)


def _do_stages(stages: Stages | None, recipe: Recipe, folder: FolderOptions, as_json: bool) -> None:
    """Do what is left of a recipe, and end with its exit code."""
    from ..bench.studies.recipe_files import Stages
    from .output.bench_tables import plain_table
    from .output.console import TerminalProgress, result_console, say

    stages = stages or Stages.begin(folder.folder(recipe.name), recipe)
    again = f"interrupted: resume with `llmopt run --resume {stages.folder}`"
    with stages.alone(), TerminalProgress(lambda: again) as progress:
        do = _do_recipe if stages.recipe.capacity is None else _find_capacity
        record, header, rows, lines = do(stages, progress)
    out = result_console(as_json, {"folder": str(stages.folder), **record})
    no_wrap = range(1, len(header))
    table = plain_table(header, rows, title=stages.recipe.name, no_wrap=no_wrap)
    table.columns[0].min_width, table.columns[0].overflow = 8, "fold"
    out.print(table)
    for line in lines:
        out.print(line)
    say(f"Report: {stages.folder / 'report.html'}", out)
    if record["exit_code"]:
        raise typer.Exit(record["exit_code"])


Outcome = tuple[Mapping[str, Any], Sequence[str], Sequence[Sequence[str]], Sequence[str]]
"""Record, header and rows of the table, and closing lines of a finished recipe."""


def _do_recipe(stages: Stages, progress: Progress) -> Outcome:
    from ..bench.studies.recipe_page import HEADER, gate_sentence, recipe_verdict, verdict_rows
    from ..bench.studies.recipe_run import run_recipe

    run = run_recipe(stages, progress)
    # The report has all columns; 80 columns fit only these.
    shown = [number for number, heading in enumerate(HEADER) if heading not in ("TTFT", "overall")]
    header, *rows = ([row[n] for n in shown] for row in (HEADER, *verdict_rows(run)))
    verdict = recipe_verdict(run)
    lines = f"{verdict.headline} {verdict.sentence}", gate_sentence(run)
    return run.record(), header, rows, lines


def _find_capacity(stages: Stages, progress: Progress) -> Outcome:
    from ..bench.report.parts import write_page
    from ..bench.studies.recipe_page import capacity_page, capacity_table, capacity_verdict
    from ..bench.studies.recipe_run import run_capacity

    run = run_capacity(stages, progress)
    write_page(capacity_page(run), run.folder)
    shown, verdict = capacity_table(run), capacity_verdict(run)
    return run.record, shown.header, shown.rows, (f"{verdict.headline} {verdict.sentence}",)
