"""`llmopt report`: combine several runs into one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.command import writable


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders or result.json files, two or more.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=writable, help="The HTML file to write.")
    ] = Path("report.html"),
    markdown: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the tables as Markdown to this file too."),
    ] = None,
) -> None:
    """Combine runs into one page: speed, quality and size side by side, and the Pareto front."""
    from ..bench.page.page import to_html, to_markdown
    from ..bench.record.result import RunData
    from ..quant.base.atomic_io import write_atomically
    from .output.console import result_console

    read = [RunData.read(path) for path in runs]
    from ..bench.report.joined import joined_page  # imports torch

    page = joined_page(read)
    write_atomically(output, to_html(page))
    if markdown is not None:
        write_atomically(markdown, to_markdown(page.without_figures()))
    out = result_console(False)
    out.print(f"{page.verdict.headline} {page.verdict.sentence}", markup=False)
    out.print(f"Report: {output}", markup=False, soft_wrap=True)
