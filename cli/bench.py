"""`llmopt bench`: benchmark a model's speed, quality and memory under load, into a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .options.common import ModelOptions
from .options.conversation import ConversationOptions
from .options.engine import EngineOptions, check_models
from .options.groups import values_of, with_groups
from .options.load import LoadOptions
from .options.result import ResultOptions
from .options.score import MetricOptions, QualityOptions, RecordOptions
from .options.server import TargetOptions
from .options.sweep import GridOptions, SweepOptions
from .options.tracking import TrackingOptions
from .options.verdict import VerdictOptions
from .options.workload import ArrivalOptions, DataOptions

if TYPE_CHECKING:
    from ..bench.gate.outputs import VerdictWanted
    from ..bench.options.options import BenchOptions
    from ..bench.record.tracking import Tracker
    from ..bench.session.run_sessions import Judged


@with_groups
def bench(
    model: ModelOptions,
    data: DataOptions,
    conversation: ConversationOptions,
    arrivals: ArrivalOptions,
    load: LoadOptions,
    sweep: SweepOptions,
    grid: GridOptions,
    target: TargetOptions,
    engine: EngineOptions,
    metrics: MetricOptions,
    quality: QualityOptions,
    verdict: VerdictOptions,
    record: RecordOptions,
    tracking: TrackingOptions,
    result: ResultOptions,
) -> None:
    """Measure a model: latency, throughput, quality and memory, in a folder under runs/."""
    from ..bench.options.options import BenchOptions, checked
    from ..quant.base.errors import BadInput
    from .bench_grid import run_bench_grid
    from .bench_sweep import run_sweep

    if target.asks_for_the_client_alone:
        _print_client_errors(target, as_json=result.as_json)
        return
    grid.check()
    if not grid.is_asked_for:
        result.check()
    elif not grid.dry_run:  # an existing folder is continued
        result.check_writable()
    name, wanted = model.name, verdict.wanted()
    said = values_of(data, conversation, arrivals, load, target, metrics, quality, record)
    given = {**said, **engine.keywords(), **_parsed(target, metrics, record), "model": name}
    # Options that were not given stay unset: some data sets have their own defaults.
    given = {key: value for key, value in given.items() if value is not None}
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


def _parsed(target: TargetOptions, metrics: MetricOptions, record: RecordOptions) -> dict[str, Any]:
    """Options parsed from their command-line strings."""
    return {
        "goodput": tuple(metrics.goodput or ()),
        "metadata": _pairs(record.metadata or (), "--metadata"),
        "header": _pairs(target.header or (), "--header"),
        "extra_body": target.added_fields(),
    }


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


def _print_client_errors(target: TargetOptions, *, as_json: bool) -> None:
    """Client certification: the load client's error against a server of known latency, per concurrency."""
    from ..bench.load.certify import check_client
    from ..bench.report.client_report import check_table
    from .output.console import TerminalProgress, emit_json, result_console

    progress = TerminalProgress()
    burden = target.client_burden_ms / 1000
    try:
        found, errors = check_client(target.client_workers, burden=burden, progress=progress)
    finally:
        progress.finish()
    if as_json:
        emit_json(found)
    result_console(as_json).print(check_table(errors), markup=False, soft_wrap=True)


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    from ..quant.base.errors import BadInput

    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise BadInput(f"{option} {word!r}: write KEY=VALUE")
        found[key] = value
    return found
