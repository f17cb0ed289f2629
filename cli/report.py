"""`llmopt report`: combine several runs into one page, or into a table for Apache Otava."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.command import output_to, writable


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders or result.json files, two or more.")
    ],
    output: Annotated[Path, output_to("The HTML file to write.")] = Path("report.html"),
    markdown: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the tables as Markdown to this file too."),
    ] = None,
    otava: Annotated[
        Path | None,
        typer.Option(
            callback=writable,
            help="Write the runs of one series as CSV for Apache Otava to this file instead: a row "
            "a run.",
        ),
    ] = None,
) -> None:
    """Combine runs into one page: speed, quality and size side by side, and the Pareto front."""
    from ..bench.record.result import RunData
    from .output.console import result_console, say

    if otava is not None:
        from ..bench.report.otava import write_otava

        out = result_console(False)
        for sentence in write_otava(otava, runs):
            say(f"note: {sentence}", out)
        say(f"Table: {otava}", out)
        return
    read = [RunData.read(path) for path in runs]
    from ..bench.report.joined import joined_page  # imports torch

    page = joined_page(read)
    page.write(output, markdown)
    out = result_console(False)
    out.print(f"{page.verdict.headline} {page.verdict.sentence}")
    say(f"Report: {output}", out)
