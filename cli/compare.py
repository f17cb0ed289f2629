"""`llmopt compare`: two runs, one verdict, one exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.gate.compare import Comparison, RunData


def compare(
    base: Annotated[Path, typer.Argument(help="A run folder or result.json: what it was before.")],
    new: Annotated[Path, typer.Argument(help="A run folder or result.json: what it is now.")],
    threshold: Annotated[
        str, typer.Option(help="How much worse a speed may get: 5% or 0.05.")
    ] = "5%",
    gate: Annotated[
        str | None,
        typer.Option(
            help='Limits instead of --threshold, such as "p99_ttft_ms<=+10% output_throughput>=-5% '
            'kl<=0.02 weight_bytes<=+0%". With % on the change, without on the value.'
        ),
    ] = None,
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
    junit: Annotated[
        Path | None, typer.Option(help="Write the verdict as JUnit XML to this file.")
    ] = None,
    benchmark_json: Annotated[
        Path | None,
        typer.Option(
            help="Write the new run for github-action-benchmark: this file is customSmallerIsBetter, "
            "the one beside it with .bigger before its ending is customBiggerIsBetter."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")
    ] = False,
) -> None:
    """Judge a run against another: exit 0 pass, 1 regression, 3 no verdict."""
    from ..bench.gate.compare import QualityGate, RunData, parse_share
    from ..bench.gate.compare import compare as judge
    from ..bench.gate.gate import parse_gate
    from .output.console import emit_json, result_console

    quality = QualityGate(
        None if max_ppl_increase is None else parse_share(max_ppl_increase),
        max_kl,
        None if min_top1 is None else parse_share(min_top1),
    )
    limits = parse_gate(gate) if gate is not None else ()
    before, after = RunData.read(base), RunData.read(new)
    share = parse_share(threshold)
    comparison = judge(before, after, threshold=share, limits=limits, gate=quality)
    write_files(before, after, comparison, markdown, html, junit, benchmark_json)
    if as_json:
        emit_json(comparison.as_dict())
    print_comparison(comparison, result_console(as_json))
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def write_files(
    before: RunData,
    after: RunData,
    comparison: Comparison,
    markdown: Path | None,
    html: Path | None,
    junit: Path | None,
    benchmark_json: Path | None,
) -> None:
    """The files of a verdict that were asked for."""
    from ..bench.files.run_folder import write_whole
    from ..bench.gate.outputs import write_benchmark_json, write_junit

    if html is not None or markdown is not None:
        from ..bench.page.page import to_html, to_markdown
        from ..bench.report.comparison_page import comparison_page

        if html is not None:
            write_whole(html, to_html(comparison_page(before, after, comparison)))
        if markdown is not None:
            page = comparison_page(before, after, comparison, with_figures=False)
            write_whole(markdown, to_markdown(page))
    if junit is not None:
        write_junit(junit, comparison)
    if benchmark_json is not None:
        write_benchmark_json(benchmark_json, after, comparison)


def print_comparison(comparison: Comparison, out: Console) -> None:
    """The verdict with everything behind it."""
    from rich import box
    from rich.table import Table

    from ..bench.page.text import number, percent
    from ..bench.report.comparison_tables import check_rows, memory_rows, quality_rows

    title = f"{comparison.new} against {comparison.base}"
    # The page has the intervals too; a terminal of 80 columns has room for these.
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    for heading in ("", "base", "new", "change", "± 90 %", "limit", "verdict"):
        table.add_column(heading, justify="left" if not heading else "right")
    for delta in comparison.deltas:
        table.add_row(
            f"{delta.label} ({delta.unit})",
            number(delta.base),
            number(delta.new),
            percent(delta.change, signed=True),
            percent((delta.high - delta.low) / 2),
            delta.limit,
            delta.outcome.value,
        )
    for row in check_rows(comparison.checks):
        table.add_row(*row)
    table.add_section()
    for row in [*quality_rows(comparison), *memory_rows(comparison)]:
        table.add_row(*row)
    if table.row_count:
        out.print(table)
    for note in comparison.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"{comparison.outcome.value.upper()}: {'; '.join(comparison.reasons)}", markup=False)
