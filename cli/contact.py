"""`llmopt contact`: what a GPU does with this project's kernels and models, in one record and one page."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from .options.command import output_to
from .options.shared import Json


def contact(
    output: Annotated[
        Path | None,
        output_to(
            "The record to write or go on with; the page lies beside it. Default: "
            "runs/contact/<GPU>.json."
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option("--stages", help="Stages to run, with commas. Default: all."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cuda, or cpu with --small.")] = "cuda",
    small: Annotated[
        bool, typer.Option("--small", help="Tiny shapes: whether it runs, and no times.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what the record has already.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Try a GPU in nine minutes: kernels, models and quantizers, against what is expected of them.

    Each stage is a process with a time limit; the record is written after each, and the same command goes on
    where it was ended. Exit code 1 where an expectation failed.
    """
    from ..bench.contact.record import failures
    from ..bench.contact.run import ContactRequest, words_of
    from ..bench.contact.run import contact as run
    from .output.console import result_console, say

    request = ContactRequest(device, output, words_of(stages), small=small, again=again)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stage, and its folder
    path, record = run(request, say)
    console = result_console(as_json, record)
    failed = failures(record)
    for line in failed:
        console.print(line, soft_wrap=True)
    console.print(f"{len(failed)} failures; {path}, {path.with_suffix('.md')}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)
