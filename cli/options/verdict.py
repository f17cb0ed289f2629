"""The options of `llmopt bench` that put the run beside another, and what becomes of the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

VERDICT = "Verdict"

Baseline = Annotated[
    Path | None,
    typer.Option(
        help="A run folder or result.json: judge this run against it; the exit code is the verdict's.",
        rich_help_panel=VERDICT,
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        help="A model, or beside --base-url and --serve the URL of a server, to measure beside this one, "
        "pass by pass in turns: judge this one against it; the exit code is the verdict's. A server is "
        "sent the same key and headers.",
        rich_help_panel=VERDICT,
    ),
]
Gate = Annotated[
    str | None,
    typer.Option(
        help='Limits for the verdict, such as "p99_ttft_ms<=+10% kl<=0.02". Default: no speed 5% worse.',
        rich_help_panel=VERDICT,
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option(help="Write the verdict as JUnit XML to this file.", rich_help_panel=VERDICT),
]
BenchmarkJson = Annotated[
    Path | None,
    typer.Option(
        help="Write the run for github-action-benchmark, as `llmopt compare` does.",
        rich_help_panel=VERDICT,
    ),
]
SlowdownWhere = Annotated[
    str,
    typer.Option(help="What --slowdown stretches: step or sampler.", rich_help_panel="Load"),
]
GpuHourPrice = Annotated[
    float | None,
    typer.Option(
        help="Dollars for an hour of this machine: gives the cost of a million tokens.",
        rich_help_panel="Output",
    ),
]
Csv = Annotated[
    bool,
    typer.Option(
        "--csv", help="Write the requests as CSV too, beside Parquet.", rich_help_panel="Output"
    ),
]
