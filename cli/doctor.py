"""`llmopt doctor`: hardware, versions, what is wrong; kernel selection and kernel self-test."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer


def doctor(
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Ask torch too: time the threads, compile every C kernel, and show the kernel "
            "selected for each operation and why not the others.",
        ),
    ] = False,
    self_test: Annotated[
        bool | None,
        typer.Option(
            "--self-test/--no-self-test",
            help="Check each kernel against its reference and measure roofline ceilings. Default: "
            "with CUDA, where --all or --json is given.",
        ),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Forget which kernels earned their place on the GPU, and try them again.",
        ),
    ] = False,
    contact: Annotated[
        Path | None,
        typer.Option("--contact", help="Show what failed in this record of `llmopt contact` too."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings of --all as JSON.")
    ] = False,
) -> None:
    """Show this machine's hardware, what is wrong and what to do about it; with --all also the kernel
    selected for each operation.

    Without options nothing is timed and torch is not loaded. --self-test checks that the kernels are
    correct: exit code 1 where one is wrong.
    """
    from .output.console import emit_json, result_console
    from .output.doctor_tables import show_findings

    told = {} if contact is None else _of_contact(contact)
    findings = _findings(asks_torch=everything or as_json, renew=renew) | told
    health = None
    if bool(findings.get("cuda")) if self_test is None else self_test:
        from ..bench.machine.roofline import check_health

        health = check_health()
    findings["health"] = health
    if as_json:
        emit_json(findings)
    else:
        show_findings(findings, result_console(as_json))
    if health is not None and not health["passed"]:
        raise typer.Exit(1)


def _of_contact(path: Path) -> dict[str, Any]:
    """A record's date, GPU, failures, and how many expectations hold.

    Raises:
        BadInput: it is none.
    """
    from ..bench.contact.record import failures, findings, read_record

    record = read_record(path)
    held = [each["met"] for each in findings(record) if each["met"] is not None]
    head = {"file": str(path), "date": record["date"], "gpu": record["environment"].get("gpu")}
    counts = {"held": sum(held), "expectations": len(held)}
    return {"contact": head | counts | {"failures": failures(record)}}


def _findings(*, asks_torch: bool, renew: bool) -> dict[str, Any]:
    """The facts, and what is wrong; with `asks_torch` or `renew` also the verdicts on the GPU's kernels."""
    from ..bench.machine.overview import overview, problems

    if renew:
        from ..bench.machine.kernel_table import renew_verdicts

        renew_verdicts()
    if asks_torch:
        from ..bench.machine.kernel_table import examine

        findings = examine()
    else:
        findings = overview()
    findings["problems"] = [asdict(problem) for problem in problems(findings)]
    if asks_torch or renew:
        from ..bench.machine.kernel_table import report

        findings["verdicts"] = report()
    return findings
