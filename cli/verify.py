"""`llmopt verify`: check a quantized checkpoint against its manifest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options.command import with_options
from .options.shared import json_option, trust_option


@with_options
def verify(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a quantized checkpoint, or a .gguf file.")
    ],
    trust_remote_code: bool = trust_option(),
    as_json: bool = json_option(),
) -> None:
    """Re-read a quantized checkpoint with an independent reader; exit 1 if it is not what was computed."""
    from ..quant.source.models import check_local, refuse_mock, refuse_plain

    check_local(folder)  # before torch is imported
    refuse_mock(folder, "verify")
    refuse_plain(folder)
    from ..engine.planner.catalog import facts_of
    from ..quant.convert.verify import verify as run
    from .output.console import TerminalProgress, result_console, say

    with TerminalProgress() as progress:
        report = run(folder, progress, trust_remote_code=trust_remote_code)
    facts = facts_of(report.folder)
    answer = asdict(report) | {"ok": report.ok, "model": asdict(facts)}
    console = result_console(as_json, answer)
    say(f"{report.folder}: {report.quant_method} {report.scheme}", console)
    say(f"  {facts.line}", console)
    for line in report.passed:
        say(f"  ok    {line}", console)
    for line in report.unchecked:
        say(f"  --    not checked: {line}", console)
    for line in report.failures:
        console.print(f"  FAIL  {line}", style="red", soft_wrap=True)
    console.print(report.status, style="green" if report.ok else "red", soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)
