"""Load options of `llmopt bench`: concurrency, runs, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from .groups import Hidden


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Load options besides the arrivals."""

    PANEL: ClassVar = "Load"

    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            help="Maximum requests or conversations in flight. Default: 8; no limit with --request-rate.",
        ),
        Hidden("--multi-turn-concurrency"),
    ] = None
    duration: Annotated[
        str | None,
        typer.Option(
            "--duration",
            help="Length of a pass, such as 60s: the workload repeats, requests in flight at the end are "
            "drained and counted apart.",
        ),
        Hidden("--max-seconds"),
    ] = None
    num_runs: Annotated[
        int | None,
        typer.Option(help="Passes over the workload. Default: 5, in a sweep 1 per load."),
    ] = None
    max_redone_passes: Annotated[
        int | None,
        typer.Option(help="Disturbed passes that are measured again, at most. Default: 2."),
    ] = None
    num_warmups: Annotated[
        int | None,
        typer.Option(help="Warm-up requests. Default: the concurrency."),
    ] = None
    lora_assignment: Annotated[
        str,
        typer.Option(help="How requests get the adapters of --lora: round-robin or random."),
    ] = "round-robin"
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Fixed output lengths, so that checkpoints do equal work.",
        ),
    ] = True
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    slowdown: Annotated[
        float,
        typer.Option(
            help="Slow every step down by this factor, to prove that a comparison detects it. "
            "The result records it."
        ),
    ] = 1.0
    slowdown_where: Annotated[
        str, typer.Option(help="Part that --slowdown slows down: step or sampler.")
    ] = "step"
