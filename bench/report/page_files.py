"""The files of a page: HTML, Markdown, and an SVG file per figure."""

from __future__ import annotations

from pathlib import Path

from ...quant.base.atomic_io import write_atomically
from ..page.page import Page, to_html, to_markdown


def write_page(page: Page, folder: Path) -> None:
    """Write the files of a page; the HTML last, so that it exists only when all files do."""
    for section in page.sections:
        for figure in section.figures:
            write_atomically(folder / f"{figure.name}.svg", standalone(figure.svg))
    write_atomically(folder / "report.md", to_markdown(page))
    write_atomically(folder / "report.html", to_html(page))


def standalone(svg: str) -> str:
    """The SVG as a standalone file, with an XML prologue."""
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg
