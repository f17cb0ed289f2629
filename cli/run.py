"""`llmopt run`: a whole workflow from a YAML recipe, ending in one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A YAML file, or a bundled recipe: quickstart, method-shootout or ci-regression."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print its steps; do nothing.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Where the run folder is made.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")
    ] = False,
) -> None:
    """Carry out a recipe: bench, quantize, verify, bench again, compare, report."""
    from ..bench.recipe import read_recipe, steps_of

    steps = read_recipe(recipe)
    if dry_run:
        from .output import emit_json, result_console

        if as_json:
            emit_json({"name": steps.name, "steps": steps_of(steps)})
        for number, line in enumerate(steps_of(steps), 1):
            result_console(as_json).print(f"{number}. {line}", markup=False, soft_wrap=True)
        return

    from rich import box
    from rich.table import Table

    from ..bench.recipe_page import HEADER, gate_sentence, recipe_verdict, verdict_rows
    from ..bench.run_folder import stamped
    from ..bench.workflow import run_recipe
    from .output import TerminalProgress, emit_json, people, result_console

    folder = stamped(result_dir, steps.name)
    progress = TerminalProgress()
    try:
        done = run_recipe(steps, folder, progress)
    except KeyboardInterrupt:
        progress.finish()
        people.print(f"interrupted: what finished is in {folder}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        progress.finish()
    if as_json:
        emit_json({"folder": str(folder), **done.record()})
    out = result_console(as_json)
    table = Table(title=steps.name, title_justify="left", box=box.SIMPLE, padding=0)
    # The report has all columns; a terminal of 80 has room for these.
    shown = [number for number, heading in enumerate(HEADER) if heading != "TTFT"]
    for number in shown:
        if number == 0:
            table.add_column(HEADER[number], min_width=8, overflow="fold")
        else:
            table.add_column(HEADER[number], justify="right", no_wrap=True)
    for row in verdict_rows(done):
        table.add_row(*(row[number] for number in shown))
    out.print(table)
    verdict = recipe_verdict(done)
    out.print(f"{verdict.headline} {verdict.sentence}", markup=False)
    out.print(gate_sentence(done), markup=False)
    out.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    if done.exit_code:
        raise typer.Exit(done.exit_code)
