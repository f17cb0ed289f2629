"""`llmopt bench`: benchmark a model's speed, quality and memory under load, into a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.options.definitions import (
    ArrivalOptions,
    ConversationOptions,
    DataOptions,
    LoadOptions,
    MetricOptions,
    QualityOptions,
    RecordOptions,
    TargetOptions,
)
from ..engine.config.config import EngineConfig
from ..quant.base.option import keywords_of_words
from .options.command import From, Words, with_options
from .options.measuring import GridOptions, SweepOptions, VerdictOptions
from .options.shared import ModelOptions, ResultOptions, TrackingOptions, check_models

if TYPE_CHECKING:
    from ..bench.gate.outputs import VerdictWanted
    from ..bench.options.options import BenchOptions
    from ..bench.record.tracking import Tracker
    from ..bench.session.run_sessions import Judged


@with_options
def bench(
    model: ModelOptions,
    workload: Annotated[Words, From(DataOptions, ConversationOptions, ArrivalOptions, LoadOptions)],
    sweep: SweepOptions,
    grid: GridOptions,
    target: Annotated[Words, From(TargetOptions)],
    engine: Annotated[Words, From(EngineConfig)],
    scores: Annotated[Words, From(MetricOptions, QualityOptions)],
    verdict: VerdictOptions,
    record: Annotated[Words, From(RecordOptions)],
    tracking: TrackingOptions,
    result: ResultOptions,
) -> None:
    """Measure a model: latency, throughput, quality and memory, in a folder under runs/."""
    from ..bench.options.model import checked
    from ..bench.options.options import BenchOptions
    from ..quant.base.errors import BadInput
    from .bench_grid import run_bench_grid
    from .bench_sweep import run_sweep

    if target["check_client"] and target["base_url"] is None and target["serve"] is None:
        _print_client_errors(target, as_json=result.as_json)
        return
    grid.check()
    if not grid.is_asked_for:
        result.check()
    elif not grid.dry_run:  # an existing folder is continued
        result.check_writable()
    name, wanted = model.name, verdict.wanted()
    given = {**workload, **target, **scores, **record, "model": name}
    # Options that were not given stay unset: some data sets have their own defaults.
    given = {key: value for key, value in given.items() if value is not None}
    given |= keywords_of_words(EngineConfig, engine)
    if grid.is_asked_for:
        if sweep.is_asked_for or wanted is not None:
            raise BadInput(
                "a grid has no load sweep, search or comparison: leave those options away"
            )
        run_bench_grid(given, grid, result, tracking.trackers())
        return
    options = checked(BenchOptions, given, "option")
    check_models(given)
    _check_inputs(options, wanted)
    if sweep.is_asked_for:
        run_sweep(options, sweep, wanted, result, tracking.trackers())
        return
    _run(options, wanted, result, tracking.trackers())


def _check_inputs(options: BenchOptions, wanted: VerdictWanted | None) -> None:
    """Raises BadInput for a model or a file that is not there, before torch is imported."""
    from ..quant.base.errors import BadInput
    from ..quant.models import resolve_model

    if options.base_url is None and options.serve is None:
        against = None if wanted is None else wanted.against
        resolve_model(options.model)
        for model in filter(None, (options.reference, against)):
            resolve_model(model)
    for flag, path in (("--plan", options.plan), ("--quality-text", options.quality_text)):
        if path is not None and not path.is_file():
            raise BadInput(f"{flag} {path}: there is no such file")


def _run(
    options: BenchOptions,
    wanted: VerdictWanted | None,
    result: ResultOptions,
    trackers: Sequence[Tracker],
) -> None:
    """Measure once, report, and judge if that is wanted. Nothing before imports torch."""
    from ..bench.load.started_server import served
    from ..bench.session.run_sessions import run_judged
    from .output.console import TerminalProgress

    progress = TerminalProgress()
    try:
        with served(options, progress) as options:
            judged = run_judged(options, wanted, progress)
    finally:
        progress.finish()
    folder = _report(judged, options, result, [] if wanted is not None else trackers)
    if wanted is not None:
        _judge(judged, wanted, folder, result.as_json, trackers)


def _judge(
    judged: Judged,
    wanted: VerdictWanted,
    folder: Path,
    as_json: bool,
    trackers: Sequence[Tracker],
) -> None:
    """The verdict, its files and its exit code; the run is logged with them."""
    from ..bench.record.tracking import of_result
    from ..bench.session.run_sessions import write_verdict
    from .output.comparison import print_comparison
    from .output.console import result_console
    from .output.tracking import track

    write_verdict(judged, wanted, folder)
    track(trackers, of_result(judged.run.result, folder))
    if (comparison := judged.comparison) is None:
        return
    out = result_console(as_json)
    print_comparison(comparison, out)
    out.print(f"Comparison: {folder / 'comparison.html'}", markup=False, soft_wrap=True)
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def _report(
    judged: Judged, options: BenchOptions, result: ResultOptions, trackers: Sequence[Tracker]
) -> Path:
    """Write the run, and its baseline if it was measured too; log and print the run."""
    from ..bench.record.run_folder import stamped
    from ..bench.record.tracking import of_result
    from ..bench.session.run_sessions import write_run
    from .output.bench_tables import show_run
    from .output.console import emit_json, people, result_console
    from .output.tracking import track

    run = judged.run
    if not any(one.traces for one in run.passes):
        people.print("interrupted before any request finished: nothing was written")
        raise typer.Exit(130)
    if judged.base is not None:
        base = stamped(result.result_dir, judged.base.result["llmopt"]["name"])
        write_run(judged.base, base, with_csv=result.csv, with_report=options.report)
    folder = result.folder(run.result["llmopt"]["name"])
    write_run(run, folder, with_csv=result.csv, with_report=options.report)
    track(trackers, of_result(run.result, folder))
    if result.as_json:
        emit_json(run.result)
    out = result_console(result.as_json)
    show_run(run.result, options, out)
    if run.interrupted:
        people.print(f"interrupted: what finished is in {folder}", markup=False)
        raise typer.Exit(130)
    written = f"Report: {folder / 'report.html'}" if options.report else f"Result: {folder}"
    out.print(written, markup=False, soft_wrap=True)
    if run.result["completed"] == 0 or (run.result["llmopt"].get("tasks") or {}).get("error"):
        raise typer.Exit(1)
    return folder


def _print_client_errors(target: Words, *, as_json: bool) -> None:
    """Client certification: the load client's error against a server of known latency, per concurrency."""
    from ..bench.load.certify import check_client
    from ..bench.report.client_report import check_table
    from .output.console import TerminalProgress, emit_json, result_console

    progress = TerminalProgress()
    burden = target["client_burden_ms"] / 1000
    try:
        found, errors = check_client(target["client_workers"], burden=burden, progress=progress)
    finally:
        progress.finish()
    if as_json:
        emit_json(found)
    result_console(as_json).print(check_table(errors), markup=False, soft_wrap=True)
