"""`llmopt doctor`: hardware, versions, what is wrong; kernel selection and kernel self-test."""

from __future__ import annotations

import signal
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer

from ..base.errors import BadInput
from ..base.option import option
from .options.command import with_options
from .options.shared import output_option


@with_options
def doctor(
    everything: bool = option(
        False,
        "Ask torch too: time the threads, compile every C kernel, and show the kernel selected for each "
        "operation and why not the others.",
        flag="--all",
    ),
    self_test: bool | None = option(
        None,
        "Check each kernel against its reference and measure roofline ceilings. Default: with CUDA, where "
        "--all or --json is given.",
    ),
    renew: bool = option(
        False,
        "Forget which kernels earned their place on the GPU, and try them again.",
    ),
    gpu: bool = option(
        False,
        "Try the GPU in nine minutes: kernels, three models and every quantizer, next to what is expected.",
    ),
    output: Path | None = output_option(
        "file", "The record of --gpu, as JSON, written after each stage."
    ),
    as_json: bool = option(
        False, "Print the findings of --all, or the record of --gpu, as JSON.", flag="--json"
    ),
) -> None:
    """Show this machine's hardware, what is wrong and what to do about it; with --all also the kernel
    selected for each operation.

    Without options nothing is timed and torch is not loaded. --self-test checks that the kernels are
    correct: exit code 1 where one is wrong. --gpu runs each stage in a process with a time limit: exit
    code 1 where an expectation failed.
    """
    from .output.console import emit_json, stdout
    from .output.doctor_tables import show_findings

    if gpu and (everything or renew or self_test is not None):
        raise BadInput("--gpu is a run of its own: leave out --all, --renew and --self-test")
    if gpu:
        _try_gpu(output, as_json)
        return
    if output is not None:
        raise BadInput("--output is where --gpu writes its record: add --gpu")
    findings = _findings(asks_torch=everything or as_json, renew=renew)
    health = None
    if bool(findings.get("cuda")) if self_test is None else self_test:
        from ..bench.machine.roofline import check_health

        health = check_health()
    findings["health"] = health
    if as_json:
        emit_json(findings)
    else:
        show_findings(findings, stdout)
    if health is not None and not health["passed"]:
        raise typer.Exit(1)


def _try_gpu(output: Path | None, as_json: bool) -> None:
    """Print each finding of a check of the GPU as it comes; exit code 1 where an expectation failed."""
    from ..bench.gpu_check.run import check_gpu, failures
    from .output.console import emit_json, result_console, say

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stage, and its folder
    console = result_console(as_json)
    record = check_gpu(output, partial(say, console=console))
    failed = failures(record)
    for line in failed:
        say(line, console)
    say(f"{len(failed)} failures" + (f"; {output}" if output else ""), console)
    if as_json:
        emit_json(record)
    if failed:
        raise typer.Exit(1)


def _findings(*, asks_torch: bool, renew: bool) -> dict[str, Any]:
    """The facts, and what is wrong; with `asks_torch` or `renew` also the verdicts on the GPU's kernels."""
    from ..bench.machine.overview import overview, problems

    if not (asks_torch or renew):
        findings, verdicts = overview(), {}
    else:
        from ..bench.machine.kernel_table import examine, renew_verdicts, report

        if renew:
            renew_verdicts()
        findings = examine() if asks_torch else overview()
        verdicts = {"verdicts": report()}
    return {**findings, "problems": list(map(asdict, problems(findings))), **verdicts}
