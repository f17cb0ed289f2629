"""`llmopt bench`: measure a model under load, or at a sweep of loads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import BadInput
from ..base.option import keywords_of_words, option
from ..bench.options import definitions as of_bench
from ..bench.record.tracking import TrackingOptions
from ..engine.config.config import EngineConfig
from .options.command import From, Words, with_options
from .options.shared import (
    ModelOptions,
    ResultOptions,
    SweepOptions,
    VerdictOptions,
    check_models,
)

if TYPE_CHECKING:
    from ..bench.gate.outputs import VerdictWanted
    from ..bench.options.options import BenchOptions
    from ..bench.record.tracking import MlflowTracker
    from ..bench.session.run_sessions import Judged

WORKLOAD = (of_bench.DataOptions, of_bench.ConversationOptions)
WORKLOAD += (of_bench.ArrivalOptions, of_bench.LoadOptions)


@with_options
def bench(
    model: ModelOptions,
    workload: Annotated[Words, From(*WORKLOAD)],
    sweep: SweepOptions,
    target: Annotated[Words, From(of_bench.TargetOptions)],
    sanity: str | None = option(
        None,
        "Check that the server at this URL, or one that --serve (default: llmopt) starts with this model, "
        "answers sanely, and end: exit code 1 is broken.",
        metavar="URL",
        panel="Server",
    ),
    *,
    engine: Annotated[Words, From(EngineConfig)],
    scores: Annotated[Words, From(of_bench.MetricOptions, of_bench.QualityOptions)],
    verdict: VerdictOptions,
    record: Annotated[Words, From(of_bench.RecordOptions)],
    tracking: TrackingOptions,
    result: ResultOptions,
) -> None:
    """Measure a model: latency, throughput, quality and memory, in a folder under runs/."""
    from ..bench.gate.outputs import VerdictWanted
    from ..bench.options.options import BenchOptions, checked

    if sanity is not None:
        _check_sanity(sanity, target, model.name, as_json=result.as_json)
        return
    if target["check_client"] and target["base_url"] is None and target["serve"] is None:
        _print_client_errors(target, as_json=result.as_json)
        return
    result.check()
    wanted = VerdictWanted.checked(**asdict(verdict))
    given = {**workload, **target, **scores, **record, "model": model.name}
    # Options that were not given stay unset: some data sets have their own defaults.
    given = {key: value for key, value in given.items() if value is not None}
    given |= keywords_of_words(EngineConfig, engine)
    options = checked(BenchOptions, given, "")
    check_models(given)
    _check_inputs(options, wanted)
    if sweep.is_asked_for:
        run_sweep(options, sweep, wanted, result, tracking.tracker())
    else:
        _run(options, wanted, result, tracking.tracker())


_SMALL = 2**22
"""Bytes of a data set that is read before the model too, so that a fault in it is told at once."""


def _check_inputs(options: BenchOptions, wanted: VerdictWanted | None) -> None:
    """Raises BadInput for a model, file or server that is not there, before torch is imported."""
    from ..bench.gate.limits import Scored
    from ..bench.load.address import Address
    from ..bench.workloads.datasets import locate_dataset
    from ..bench.workloads.sharegpt import load_conversations
    from ..quant.source.models import refuse_mock, resolve_model

    name, file = locate_dataset(options.dataset, options.dataset_path)
    if name == "sharegpt" and file is not None and file.is_file() and file.stat().st_size < _SMALL:
        load_conversations(file)
    against = None if wanted is None else wanted.against
    if options.base_url is not None:
        address = Address.of(options)
        if options.model is None:
            address.model_card()
    elif options.serve is None:
        models = (options.model, *filter(None, (options.reference, against)))
        for path in map(resolve_model, models):
            refuse_mock(path, "bench")
    if wanted is not None and wanted.baseline is None and not (options.reference or against):
        scored = (limit.quantity for limit in wanted.limits if isinstance(limit.quantity, Scored))
        for score in scored:
            if score.key != "perplexity":
                text = "is a distance from a model: give --reference MODEL"
                raise BadInput(f"--gate {score.key} {text}")
    if options.quality_full and options.reference is None and not against:
        raise BadInput("--quality-full measures the distance from a model: give --reference MODEL")
    for flag, path in (("--plan", options.plan), ("--quality-text", options.quality_text)):
        if path is not None and not path.is_file():
            raise BadInput(f"{flag} {path}: there is no such file")


def _run(
    options: BenchOptions,
    wanted: VerdictWanted | None,
    result: ResultOptions,
    tracker: MlflowTracker | None,
) -> None:
    """Measure once, report, and judge if that is wanted. Nothing before imports torch."""
    from ..bench.load.started_server import served
    from ..bench.record.tracking import log_run, of_result
    from ..bench.session.run_sessions import run_judged, write_verdict
    from .output.bench_tables import print_comparison
    from .output.console import TerminalProgress, result_console, say

    with TerminalProgress() as progress, served(options, progress) as options:
        judged = run_judged(options, wanted, progress)
    folder = _report(judged, options, result, None if wanted is not None else tracker)
    if wanted is None:
        return
    write_verdict(judged, wanted, folder)
    log_run(tracker, of_result(judged.run.result, folder), say)  # with the files of the verdict
    if (comparison := judged.comparison) is None:
        return
    out = result_console(result.as_json)
    print_comparison(comparison, out)
    say(f"Comparison: {folder / 'comparison.html'}", out)
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def _report(
    judged: Judged, options: BenchOptions, result: ResultOptions, tracker: MlflowTracker | None
) -> Path:
    """Write the run, and its baseline if it was measured too; log and print the run."""
    from ..bench.record.result import stamped
    from ..bench.record.tracking import log_run, of_result
    from ..bench.session.run_sessions import write_run
    from .output.bench_tables import show_run
    from .output.console import people, result_console, say

    run = judged.run
    if not any(measured.traces for measured in run.passes):
        people.print("interrupted before any request finished: nothing was written")
        raise typer.Exit(130)
    if judged.base_run is not None:
        base = stamped(result.result_dir, judged.base_run.result["llmopt"]["name"])
        write_run(judged.base_run, base, with_csv=result.csv, with_report=options.report)
    folder = result.folder(run.result["llmopt"]["name"])
    write_run(run, folder, with_csv=result.csv, with_report=options.report)
    log_run(tracker, of_result(run.result, folder), say)
    out = result_console(result.as_json, run.result)
    show_run(run.result, options, out)
    if run.interrupted:
        people.print(f"interrupted: what finished is in {folder}")
        raise typer.Exit(130)
    written = f"Report: {folder / 'report.html'}" if options.report else f"Result: {folder}"
    say(written, out)
    if run.result["completed"] == 0 or (run.result["llmopt"].get("tasks") or {}).get("error"):
        raise typer.Exit(1)
    return folder


def _print_client_errors(target: Words, *, as_json: bool) -> None:
    """Client certification: the load client's error against a server of known latency, per concurrency."""
    from ..bench.load.fleet import check_client
    from ..bench.report.run_report import check_table
    from .output.console import TerminalProgress, result_console, say

    burden = target["client_burden_ms"] / 1000
    with TerminalProgress() as progress:
        record, errors = check_client(target["client_workers"], burden=burden, progress=progress)
    say(check_table(errors), result_console(as_json, record))


def _check_sanity(where: str, target: Words, model: str | None, *, as_json: bool) -> None:
    """Print the checks of a server; exit code 1 if one is broken. `where` is a URL, or a model to serve."""
    from ..bench.load.address import Address
    from ..bench.load.started_server import served
    from ..bench.options.options import BenchOptions, checked
    from ..bench.session.sanity import check_sanity
    from .output.bench_tables import plain_table
    from .output.console import TerminalProgress, result_console, say

    if target["base_url"] is not None:
        raise BadInput("--sanity URL names the server itself: leave --base-url away")
    given = {key: value for key, value in target.items() if value is not None}
    if where.startswith(("http://", "https://")):
        given |= {"base_url": where, "model": model}
    else:
        given |= {"serve": target["serve"] or "llmopt", "model": where}
    options = checked(BenchOptions, given, "")
    with TerminalProgress() as progress, served(options, progress) as options:
        progress.start(f"sanity of {options.base_url}", 0, "")
        report = check_sanity(Address.of(options), options.model, options.request_timeout)
        progress.finish()
    out = result_console(as_json, report.as_dict() if as_json else None)
    rows = [(check.name, check.outcome.value, check.evidence) for check in report.checks]
    out.print(plain_table(("check", "result", "evidence"), rows, left=range(3)))
    say(f"{report.model}: {'sane' if report.is_sane else 'broken'}", out)
    if not report.is_sane:
        raise typer.Exit(1)


def run_sweep(
    options: BenchOptions,
    sweep: SweepOptions,
    wanted: VerdictWanted | None,
    result: ResultOptions,
    tracker: MlflowTracker | None,
) -> None:
    """Run a sweep or an SLO search, write its folder, print its table and verdict. Raises `BadInput`: more
    than one of them, or combined with a comparison."""
    from ..bench.record.tracking import log_run, of_sweep
    from ..bench.report.run_report import points_table, sweep_verdict, write_sweep
    from .output.bench_tables import plain_table
    from .output.console import result_console, say

    if wanted is not None:
        raise BadInput("a sweep or a search compares nothing: omit --baseline and --against")
    record = _measured_loads(options, sweep)
    folder = result.folder(f"{record['name']}-{'slo' if sweep.slo else 'sweep'}")
    write_sweep(record, folder)
    log_run(tracker, of_sweep(record, folder), say)
    out = result_console(result.as_json, record)
    table, verdict = points_table(record), sweep_verdict(record)
    every = range(len(table.header))
    out.print(plain_table(table.header, table.rows, left=(), no_wrap=every))
    say(f"{verdict.headline} {verdict.sentence}", out)
    if record["interrupted"]:
        say(f"interrupted: what finished is in {folder}")
        raise typer.Exit(130)
    say(f"Report: {folder / 'report.html'}", out)
    if record["knee"] is None or (sweep.slo is not None and record["slo"]["best"] is None):
        raise typer.Exit(1)


def _measured_loads(options: BenchOptions, sweep: SweepOptions) -> dict[str, Any]:
    from ..bench.load.started_server import served
    from ..bench.options.values import parse_loads
    from ..bench.session.sweep import SweepTarget, search_slo, sweep_loads
    from .output.console import TerminalProgress

    kind = sweep.kind()
    if sweep.slo is not None:
        options = options.model_copy(update={"goodput": (sweep.slo,)})
    with TerminalProgress() as progress, served(options, progress) as options:
        sweep_target = SweepTarget(options, kind, progress)
        if sweep.slo is not None:
            return search_slo(sweep_target, sweep.slo, sweep.slo_share)
        loads = sweep.sweep_rate if sweep.sweep_concurrency is None else sweep.sweep_concurrency
        assert loads is not None
        return sweep_loads(sweep_target, parse_loads(loads, kind))
