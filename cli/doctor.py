"""`llmopt doctor`: hardware, versions, kernel selection and kernel self-test of this machine."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    self_test: Annotated[
        bool | None,
        typer.Option(
            "--self-test/--no-self-test",
            help="Check each kernel against its reference and measure roofline ceilings. Default: "
            "with CUDA.",
        ),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Forget which kernels earned their place on the GPU, and try them again.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show this machine's hardware and the kernel selected for each operation, and check that the kernels
    are correct.

    Prints versions, processor, memory, CUDA devices, which kernels earned their place on the GPU, and with
    the self-test each kernel's error. Exit code 1 where a kernel is wrong.
    """
    from ..bench.machine.health import check_health
    from ..engine.doctor.machine import examine
    from ..engine.doctor.verdicts import renew_verdicts, report
    from .output.console import emit_json, result_console
    from .output.doctor_tables import show_findings

    if renew:
        renew_verdicts()
    findings = examine() | {"verdicts": report()}
    wanted = bool(findings["cuda"]) if self_test is None else self_test
    health = check_health() if wanted else None
    findings["health"] = health
    if as_json:
        emit_json(findings)
    else:
        show_findings(findings, result_console(as_json))
    if health is not None and not health["passed"]:
        raise typer.Exit(1)
