"""Options of load sweeps and SLO searches of `llmopt bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from ...bench.options.sweep_loads import Kind


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """A load sweep, or a search for the highest load within an SLO."""

    PANEL: ClassVar = "Sweep"

    sweep_concurrency: Annotated[
        str | None,
        typer.Option(help="Measure at each of these concurrencies, such as 1,2,4,8, or auto."),
    ] = None
    sweep_rate: Annotated[
        str | None,
        typer.Option(
            help="Measure at each of these request rates, or auto: from half the rate of a single user."
        ),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            help='Find the highest load within these limits in ms, such as "ttft:200 tpot:50".'
        ),
    ] = None
    slo_by: Annotated[str, typer.Option(help="rate or concurrency.")] = "rate"
    slo_share: Annotated[
        float, typer.Option(help="Fraction of requests that must meet the limits.")
    ] = 0.95

    @property
    def is_asked_for(self) -> bool:
        return any(
            asked is not None for asked in (self.sweep_concurrency, self.sweep_rate, self.slo)
        )

    def kind(self) -> Kind:
        """The swept variable.

        Raises:
            BadInput: two sweeps at once, or invalid limits.
        """
        from ...bench.metrics.metrics import parse_goodput
        from ...quant.base.errors import BadInput

        asked = (self.sweep_concurrency, self.sweep_rate, self.slo)
        if sum(one is not None for one in asked) != 1:
            raise BadInput("give one of --sweep-concurrency, --sweep-rate and --slo")
        if self.slo is None:
            return "concurrency" if self.sweep_concurrency is not None else "rate"
        if self.slo_by not in ("rate", "concurrency"):
            raise BadInput(f"--slo-by {self.slo_by!r}: rate or concurrency")
        if not parse_goodput((self.slo,)):
            raise BadInput('--slo names no limit: write such as "ttft:200 tpot:50"')
        return "concurrency" if self.slo_by == "concurrency" else "rate"


@dataclass(frozen=True, slots=True)
class GridOptions:
    """The two parameter files of a grid, and what is done with its cells."""

    PANEL: ClassVar = "Grid"

    serve_params: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON list of the server flags of each configuration; the server of --serve is "
            "started for each. An unfinished grid is continued by the same line with its --output."
        ),
    ] = None
    bench_params: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON list of benchmark options; measured on each configuration."
        ),
    ] = None
    link_vars: Annotated[
        str | None,
        typer.Option(
            help="Measure only cells where SERVE_PARAM=BENCH_PARAM are equal, such as "
            "max_num_seqs=max_concurrency."
        ),
    ] = None
    pareto: Annotated[
        str | None,
        typer.Option(help="Axes of the Pareto plot. Default: tokens_per_user,tokens_per_gpu."),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands of the grid and end.")
    ] = False

    @property
    def is_asked_for(self) -> bool:
        return self.serve_params is not None or self.bench_params is not None

    def check(self) -> None:
        """Refuse options of a grid without one.

        Raises:
            BadInput: --link-vars, --pareto or --dry-run alone.
        """
        from ...quant.base.errors import BadInput

        if self.is_asked_for:
            return
        for name in ("link_vars", "pareto", "dry_run"):
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise BadInput(f"--{flag} needs a grid: give --serve-params or --bench-params")
