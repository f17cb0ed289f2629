"""Comparison options of `llmopt bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .common import writable

if TYPE_CHECKING:
    from ...bench.gate.outputs import VerdictWanted


@dataclass(frozen=True, slots=True)
class VerdictOptions:
    """Baseline, limits and outputs of the comparison."""

    PANEL: ClassVar = "Verdict"

    baseline: Annotated[
        Path | None,
        typer.Option(
            help="A run folder or result.json to compare this run with; the exit code is the verdict's."
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            help="A model, or with --base-url and --serve the URL of a server, to compare with in paired "
            "(interleaved) runs; the exit code is the verdict's. A server is sent the same key and "
            "headers."
        ),
    ] = None
    gate: Annotated[
        str | None,
        typer.Option(
            help='Limits for the verdict, such as "p99_ttft_ms<=+10% kl<=0.02". Default: no speed 5% worse.'
        ),
    ] = None
    junit: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the verdict as JUnit XML to this file."),
    ] = None
    benchmark_json: Annotated[
        Path | None,
        typer.Option(
            callback=writable,
            help="Write the run for github-action-benchmark, as `llmopt compare` does.",
        ),
    ] = None

    def wanted(self) -> VerdictWanted | None:
        """The requested comparison, with its inputs read.

        Raises:
            BadInput: two baselines, limits or a file without one, or an unreadable input.
        """
        from ...bench.gate.outputs import VerdictWanted

        return VerdictWanted.checked(
            self.baseline, self.against, self.gate, self.junit, self.benchmark_json
        )
