"""The options of `llmopt bench` that measure under several loads, and what they carry out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...bench.options.options import BenchOptions
    from ...bench.options.sweep_loads import Kind

SWEEP = "Sweep"

SweepConcurrency = Annotated[
    str | None,
    typer.Option(
        help="Measure at each of these numbers of users, such as 1,2,4,8, or auto.",
        rich_help_panel=SWEEP,
    ),
]
SweepRate = Annotated[
    str | None,
    typer.Option(
        help="Measure at each of these rates, or auto: from half the rate of one user alone.",
        rich_help_panel=SWEEP,
    ),
]
Slo = Annotated[
    str | None,
    typer.Option(
        help='Find the highest load that keeps limits in ms, such as "ttft:200 tpot:50".',
        rich_help_panel=SWEEP,
    ),
]
SloBy = Annotated[str, typer.Option(help="rate or concurrency.", rich_help_panel=SWEEP)]
SloShare = Annotated[
    float, typer.Option(help="Share of the requests that must be within.", rich_help_panel=SWEEP)
]
OPTION_NAMES = ("sweep_concurrency", "sweep_rate", "slo", "slo_by", "slo_share")


def run_several(
    options: BenchOptions,
    *,
    concurrency: str | None,
    rate: str | None,
    slo: str | None,
    slo_by: str,
    slo_share: float,
    result_dir: Path,
    as_json: bool,
) -> None:
    """Carry out a sweep or a search, write its folder and print its table and its answer."""
    from ...bench.metrics.metrics import parse_goodput
    from ...bench.options.sweep_loads import parse_loads
    from ...bench.report.sweep_page import points_table, sweep_verdict, write_sweep
    from ...bench.server.served import served
    from ...bench.session.slo import search_slo
    from ...bench.session.sweep import Rig, sweep_loads
    from ...quant.base.errors import BadInput
    from ..output.console import TerminalProgress, emit_json, people, result_console

    if sum(asked is not None for asked in (concurrency, rate, slo)) != 1:
        raise BadInput("give one of --sweep-concurrency, --sweep-rate and --slo")
    kind: Kind = "concurrency" if concurrency is not None else "rate"
    if slo is not None:
        if slo_by not in ("rate", "concurrency"):
            raise BadInput(f"--slo-by {slo_by!r}: rate or concurrency")
        if not parse_goodput((slo,)):
            raise BadInput('--slo names no limit: write such as "ttft:200 tpot:50"')
        kind = "concurrency" if slo_by == "concurrency" else "rate"
        options = options.model_copy(update={"goodput": (slo,)})
    progress = TerminalProgress()
    try:
        with served(options, progress) as options:
            rig = Rig(options, kind, progress)
            if slo is not None:
                record = search_slo(rig, slo, slo_share).as_dict()
            else:
                text = rate if concurrency is None else concurrency
                assert text is not None
                record = sweep_loads(rig, parse_loads(text, kind)).as_dict()
    finally:
        progress.finish()

    from rich import box
    from rich.table import Table

    from ...bench.files.run_folder import stamped

    folder = write_sweep(
        record, stamped(result_dir, f"{record['name']}-{'slo' if slo else 'sweep'}")
    )
    if as_json:
        emit_json(record)
    out = result_console(as_json)
    found = points_table(record)
    table = Table(box=box.SIMPLE, padding=0)
    for heading in found.header:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*row)
    out.print(table)
    verdict = sweep_verdict(record)
    out.print(f"{verdict.headline} {verdict.sentence}", markup=False)
    if record["interrupted"]:
        people.print(f"interrupted: what finished is in {folder}", markup=False, soft_wrap=True)
        raise typer.Exit(130)
    out.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    if record["knee"] is None or (slo is not None and record["slo"]["best"] is None):
        raise typer.Exit(1)
