"""`llmopt compare`: two runs, one verdict, one exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options.comparison import LimitOptions, VerdictFileOptions
from .options.groups import with_groups

if TYPE_CHECKING:
    from ..bench.gate.compare import Comparison, RunData


@with_groups
def compare(
    base: Annotated[Path, typer.Argument(help="Base: a run folder or result.json.")],
    new: Annotated[Path, typer.Argument(help="New: a run folder or result.json.")],
    limits: LimitOptions,
    files: VerdictFileOptions,
) -> None:
    """Compare two runs: exit 0 pass, 1 regression, 3 no verdict."""
    from ..bench.gate.compare import RunData, parse_share
    from ..bench.gate.compare import compare as judge
    from ..bench.gate.gate import parse_gate
    from .output.comparison import print_comparison
    from .output.console import emit_json, result_console

    quality = limits.quality_gate()
    gate = parse_gate(limits.gate) if limits.gate is not None else ()
    before, after = RunData.read(base), RunData.read(new)
    share = parse_share(limits.threshold)
    comparison = judge(before, after, threshold=share, limits=gate, gate=quality)
    _write_files(before, after, comparison, files)
    if files.as_json:
        emit_json(comparison.as_dict())
    print_comparison(comparison, result_console(files.as_json))
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def _write_files(
    before: RunData, after: RunData, comparison: Comparison, files: VerdictFileOptions
) -> None:
    """Write the requested verdict files."""
    from ..bench.files.run_folder import write_atomically
    from ..bench.gate.outputs import write_benchmark_json, write_junit

    if files.output is not None or files.markdown is not None:
        from ..bench.page.page import to_html, to_markdown
        from ..bench.report.comparison_page import comparison_page

        if files.output is not None:
            write_atomically(files.output, to_html(comparison_page(before, after, comparison)))
        if files.markdown is not None:
            page = comparison_page(before, after, comparison, with_figures=False)
            write_atomically(files.markdown, to_markdown(page))
    if files.junit is not None:
        write_junit(files.junit, comparison)
    if files.benchmark_json is not None:
        write_benchmark_json(files.benchmark_json, after, comparison)
