"""`llmopt compare`: the limits of the verdict, paired starts, and the files of the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .common import Json, writable
from .groups import Hidden

if TYPE_CHECKING:
    from ...bench.gate.quality_checks import QualityGate


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How much worse the new run may be."""

    threshold: Annotated[str, typer.Option(help="How much worse a speed may get: 5% or 0.05.")] = (
        "5%"
    )
    gate: Annotated[
        str | None,
        typer.Option(
            help='Limits instead of --threshold, such as "p99_ttft_ms<=+10% output_throughput>=-5% '
            'kl<=0.02 weight_bytes<=+0%". With % on the change, without on the value.'
        ),
    ] = None
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="How much perplexity may rise, such as 2%.")
    ] = None
    max_kl: Annotated[
        float | None, typer.Option(help="Most KL divergence of the new run from its reference.")
    ] = None
    min_top1: Annotated[
        str | None, typer.Option(help="Least top-1 agreement with the reference, such as 95%.")
    ] = None

    def quality_gate(self) -> QualityGate:
        """Raises `BadInput` for an invalid share."""
        from ...bench.gate.compare import parse_share
        from ...bench.gate.quality_checks import QualityGate

        return QualityGate(
            None if self.max_ppl_increase is None else parse_share(self.max_ppl_increase),
            self.max_kl,
            None if self.min_top1 is None else parse_share(self.min_top1),
        )


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Two builds, measured in fresh processes that alternate."""

    PANEL: ClassVar = "Paired starts"

    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SPEC",
            help="A build to measure: a virtual environment, a command line, or a server's URL. Given "
            "twice, the base first; options of `llmopt bench` go behind `--`.",
        ),
    ] = None
    max_starts: Annotated[
        int | None, typer.Option(help="Most starts of both builds together. Default: 80.")
    ] = None
    max_minutes: Annotated[
        float | None, typer.Option(help="Most minutes of measuring. Default: 10.")
    ] = None
    pin_cpus: Annotated[
        str | None,
        typer.Option(help="CPUs of a pair of starts: auto (the idlest), none, or such as 0,2-3."),
    ] = None
    interleave: Annotated[
        bool | None,
        typer.Option(
            "--interleave/--no-interleave",
            help="Keep both processes of a pair alive, and let their passes alternate. Default: yes, "
            "but not where they would share a GPU or start servers.",
        ),
    ] = None
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the interrupted comparison in this folder.")
    ] = None

    @property
    def is_asked_for(self) -> bool:
        return self.run is not None or self.resume is not None

    def check_absent(self) -> None:
        """Raises `BadInput` for an option that two recorded runs have no use for."""
        from ...quant.base.errors import BadInput

        for name in ("max_starts", "max_minutes", "pin_cpus", "interleave"):
            if getattr(self, name) is not None:
                raise BadInput(
                    f"--{name.replace('_', '-')} needs --run: recorded runs start nothing"
                )


@dataclass(frozen=True, slots=True)
class VerdictFileOptions:
    """The files of a verdict."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=writable,
            help="Write the comparison as one HTML file; with --run, the folder of the starts.",
        ),
        Hidden("--html"),
    ] = None
    markdown: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the comparison as Markdown to this file."),
    ] = None
    junit: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the verdict as JUnit XML to this file."),
    ] = None
    benchmark_json: Annotated[
        Path | None,
        typer.Option(
            callback=writable,
            help="Write the new run for github-action-benchmark: this file is customSmallerIsBetter, "
            "the one beside it with .bigger before its ending is customBiggerIsBetter.",
        ),
    ] = None
    as_json: Json = False
