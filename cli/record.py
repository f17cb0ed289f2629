"""`llmopt record`: a proxy before a server that writes a trace of its load for `bench --trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.command import output_to
from .options.shared import Json


def record(
    upstream: Annotated[
        str | None, typer.Option("--upstream", help="The server, such as http://localhost:8000.")
    ] = None,
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
    check: Annotated[
        bool, typer.Option("--check", help="Measure what the proxy adds to a chunk's way, and end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Record the load of a server through a proxy, without its text.

    Point its clients here, and every request passes through, byte for byte. The trace has arrival times,
    lengths, shared prefixes and cancellation of each request. Replay it with `llmopt bench --trace FILE`.
    """
    from ..bench.load.recorder import added_latency
    from ..bench.load.recorder import record as run
    from ..bench.load.trace_writer import totals_lines
    from ..quant.base.errors import BadInput
    from .output.console import result_console, say

    if check:
        found = added_latency()
        added = found["added"]
        say(
            f"At {found['streams']} streams the proxy adds {added['median']:.2f} ms to a chunk in the "
            f"median, {added['p99']:.2f} ms in the 99th percentile, and takes "
            f"{found['cpu_us_per_chunk']:.0f} us of CPU for each.",
            result_console(as_json, found),
        )
        return
    if upstream is None:
        raise BadInput("llmopt record needs --upstream URL: the server whose load is recorded")

    path = output or Path("trace.jsonl")
    totals = run(upstream, path, host=host, port=port, salt=salt, keep_text=keep_text, say=say)
    console = result_console(as_json, {"path": str(path), **totals})
    for line in totals_lines(totals):
        console.print(line, soft_wrap=True)
    console.print(str(path), soft_wrap=True)
