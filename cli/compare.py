"""`llmopt compare`: two runs, one verdict, one exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.compare import Comparison


def compare(
    base: Annotated[Path, typer.Argument(help="A run folder or result.json: what it was before.")],
    new: Annotated[Path, typer.Argument(help="A run folder or result.json: what it is now.")],
    threshold: Annotated[
        str, typer.Option(help="How much worse a speed may get: 5% or 0.05.")
    ] = "5%",
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="How much perplexity may rise, such as 2%.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Most KL divergence of the new run from its reference.")
    ] = None,
    min_top1: Annotated[
        str | None, typer.Option(help="Least top-1 agreement with the reference, such as 95%.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the comparison as Markdown to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the comparison as one HTML file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")
    ] = False,
) -> None:
    """Judge a run against another: exit 0 pass, 1 regression, 3 no verdict."""
    from ..bench.compare import QualityGate, RunData, parse_share
    from ..bench.compare import compare as judge
    from .output import emit_json, result_console

    gate = QualityGate(
        None if max_ppl_increase is None else parse_share(max_ppl_increase),
        max_kl,
        None if min_top1 is None else parse_share(min_top1),
    )
    before, after = RunData.read(base), RunData.read(new)
    comparison = judge(before, after, threshold=parse_share(threshold), gate=gate)
    if markdown is not None or html is not None:
        from ..bench.comparison_page import comparison_page
        from ..bench.page import to_html, to_markdown
        from ..bench.run_folder import write_whole

        if html is not None:
            write_whole(html, to_html(comparison_page(before, after, comparison)))
        if markdown is not None:
            page = comparison_page(before, after, comparison, with_figures=False)
            write_whole(markdown, to_markdown(page))
    if as_json:
        emit_json(comparison.as_dict())
    _print(comparison, result_console(as_json))
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def _print(comparison: Comparison, out: Console) -> None:
    from rich.table import Table

    from ..bench.comparison_page import memory_rows, quality_rows
    from ..bench.text import number, percent

    table = Table(title=f"{comparison.new} against {comparison.base}", title_justify="left")
    for heading in ("", "base", "new", "change", "90 % interval", "verdict"):
        table.add_column(heading, justify="left" if not heading else "right")
    for delta in comparison.deltas:
        table.add_row(
            f"{delta.label} ({delta.unit})",
            number(delta.base),
            number(delta.new),
            percent(delta.change, signed=True),
            f"{percent(delta.low, signed=True)} to {percent(delta.high, signed=True)}",
            delta.outcome.value,
        )
    table.add_section()
    for row in [*quality_rows(comparison), *memory_rows(comparison)]:
        table.add_row(*row)
    if table.row_count:
        out.print(table)
    for note in comparison.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"{comparison.outcome.value.upper()}: {'; '.join(comparison.reasons)}", markup=False)
