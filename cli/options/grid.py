"""Options of a grid over server flags and benchmark options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer


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
