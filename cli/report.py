"""`llmopt report`: combine several runs into one page, or into a table for Apache Otava."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.option import option
from .options.command import with_options
from .options.shared import output_option


@with_options
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders or result.json files, two or more.")
    ],
    output: Path = output_option("file", "The HTML file to write.", Path("report.html")),
    markdown: Path | None = option(
        None, "Write the tables as Markdown to this file too.", writes="file"
    ),
    otava: Path | None = option(
        None,
        "Write the runs of one series as CSV for Apache Otava to this file instead: a row a run.",
        writes="file",
    ),
) -> None:
    """Combine runs into one page: speed, quality and size side by side, and the Pareto front."""
    from ..bench.record.result import RunData
    from .output.console import say, stdout

    if otava is not None:
        from ..bench.report.otava import write_otava

        for sentence in write_otava(otava, runs):
            say(f"note: {sentence}", stdout)
        say(f"Table: {otava}", stdout)
        return
    read = [RunData.read(path) for path in runs]
    from ..bench.report.joined import joined_page  # imports torch

    page = joined_page(read)
    page.write(output, markdown)
    stdout.print(f"{page.verdict.headline} {page.verdict.sentence}")
    say(f"Report: {output}", stdout)
