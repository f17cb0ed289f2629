"""`llmopt compare`: two runs, or paired starts of two builds; one verdict, one exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options.command import with_options
from .options.measuring import LimitOptions, StartOptions, VerdictFileOptions

if TYPE_CHECKING:
    from ..bench.gate.compare import Comparison, RunData


@with_options
def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BASE NEW]",
            help="Two runs, each a folder or its result.json. With --run: `--` and options of bench.",
        ),
    ] = None,
    *,
    limits: LimitOptions,
    starts: StartOptions,
    files: VerdictFileOptions,
) -> None:
    """Compare two runs, or paired starts of two builds: exit 0 pass, 1 regression, 3 no verdict."""
    from .output.comparison import print_comparison
    from .output.console import emit_json, result_console

    if starts.is_asked_for:
        from .compare_starts import compare_starts

        comparison, record = compare_starts(arguments or (), limits, starts, files)
    else:
        starts.check_absent()
        comparison = _compare_runs(arguments or [], limits, files)
        record = comparison.as_dict()
    if files.as_json:
        emit_json(record)
    print_comparison(comparison, result_console(files.as_json))
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def _compare_runs(paths: list[str], limits: LimitOptions, files: VerdictFileOptions) -> Comparison:
    from ..bench.gate.compare import RunData, parse_share
    from ..bench.gate.compare import compare as judge
    from ..bench.gate.limits import parse_gate
    from ..quant.base.errors import BadInput
    from .output.verdict_files import write_machine_readable

    if len(paths) != 2:
        raise BadInput(
            f"compare takes two runs, base and new, and {len(paths)} were given: see llmopt compare --help"
        )
    quality = limits.quality_gate()
    gate = parse_gate(limits.gate) if limits.gate is not None else ()
    share = parse_share(limits.threshold)
    before, after = (RunData.read(Path(path)) for path in paths)
    comparison = judge(before, after, threshold=share, limits=gate, gate=quality)
    _write_page(before, after, comparison, files)
    write_machine_readable(after, comparison, files)
    return comparison


def _write_page(
    before: RunData, after: RunData, comparison: Comparison, files: VerdictFileOptions
) -> None:
    """The comparison as HTML and Markdown, where they were asked for."""
    if files.output is None and files.markdown is None:
        return
    from ..bench.page.page import to_html, to_markdown
    from ..bench.report.comparison_page import comparison_page
    from ..quant.base.atomic_io import write_atomically

    if files.output is not None:
        write_atomically(files.output, to_html(comparison_page(before, after, comparison)))
    if files.markdown is not None:
        page = comparison_page(before, after, comparison, with_figures=False)
        write_atomically(files.markdown, to_markdown(page))
