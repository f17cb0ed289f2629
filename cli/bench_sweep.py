"""`llmopt bench` with a load sweep or an SLO search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.gate.outputs import VerdictWanted
    from ..bench.options.options import BenchOptions
    from ..bench.record.tracking import Tracker
    from .options.measuring import SweepOptions
    from .options.shared import ResultOptions


def run_sweep(
    options: BenchOptions,
    sweep: SweepOptions,
    wanted: VerdictWanted | None,
    result: ResultOptions,
    trackers: Sequence[Tracker],
) -> None:
    """Run a sweep or an SLO search, write its folder, print its table and verdict.

    Raises:
        BadInput: more than one of them, or combined with a comparison.
    """
    from ..bench.record.tracking import of_sweep
    from ..bench.report.sweep_page import write_sweep
    from ..quant.base.errors import BadInput
    from .output.console import emit_json, people, result_console
    from .output.tracking import track

    if wanted is not None:
        raise BadInput("a sweep or a search compares nothing: omit --baseline and --against")
    record = _measured(options, sweep)
    folder = result.folder(f"{record['name']}-{'slo' if sweep.slo else 'sweep'}")
    write_sweep(record, folder)
    track(trackers, of_sweep(record, folder))
    if result.as_json:
        emit_json(record)
    out = result_console(result.as_json)
    _show(record, out)
    if record["interrupted"]:
        people.print(f"interrupted: what finished is in {folder}", markup=False, soft_wrap=True)
        raise typer.Exit(130)
    out.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    if record["knee"] is None or (sweep.slo is not None and record["slo"]["best"] is None):
        raise typer.Exit(1)


def _measured(options: BenchOptions, sweep: SweepOptions) -> dict[str, Any]:
    from ..bench.load.started_server import served
    from ..bench.options.values import parse_loads
    from ..bench.session.sweep import SweepTarget, search_slo, sweep_loads
    from .output.console import TerminalProgress

    kind = sweep.kind()
    if sweep.slo is not None:
        options = options.model_copy(update={"goodput": (sweep.slo,)})
    progress = TerminalProgress()
    try:
        with served(options, progress) as options:
            sweep_target = SweepTarget(options, kind, progress)
            if sweep.slo is not None:
                return search_slo(sweep_target, sweep.slo, sweep.slo_share).as_dict()
            loads = sweep.sweep_rate if sweep.sweep_concurrency is None else sweep.sweep_concurrency
            assert loads is not None
            return sweep_loads(sweep_target, parse_loads(loads, kind)).as_dict()
    finally:
        progress.finish()


def _show(record: dict[str, Any], out: Console) -> None:
    from ..bench.report.sweep_page import points_table, sweep_verdict
    from .output.bench_tables import print_table

    print_table(points_table(record), out)
    verdict = sweep_verdict(record)
    out.print(f"{verdict.headline} {verdict.sentence}", markup=False)
