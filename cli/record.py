"""`llmopt record`: a proxy before a server that writes a trace of its load for `bench --trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.command import output_to
from .options.shared import Json


def record(
    upstream: Annotated[
        str, typer.Option("--upstream", help="The server, such as http://localhost:8000.")
    ],
    output: Annotated[
        Path | None, output_to("The trace to write or append to. Default: ./trace.jsonl.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is a free one.")
    ] = 8800,
    keep_text: Annotated[
        bool, typer.Option("--keep-text", help="Write prompts and answers too.")
    ] = False,
    salt: Annotated[
        str | None,
        typer.Option(
            help="Of the block hashes, for recorders whose traces are joined. Default: a random one.",
            envvar="LLMOPT_RECORD_SALT",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Record the load of a server: point its clients here, and every request passes through, byte for byte.

    The trace has arrival times, lengths, shared prefixes and cancellation of each request, and no text.
    Replay it with `llmopt bench --trace FILE`.
    """
    from ..bench.load.recorder import record as run
    from ..bench.load.recorder import totals_lines
    from .output.console import result_console, say

    path = output or Path("trace.jsonl")
    totals = run(upstream, path, host=host, port=port, salt=salt, keep_text=keep_text, say=say)
    console = result_console(as_json, {"path": str(path), **totals})
    for line in totals_lines(totals):
        console.print(line, soft_wrap=True)
    console.print(str(path), soft_wrap=True)
