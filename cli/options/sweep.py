"""`llmopt bench` under several loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from ...bench.options.sweep_loads import Kind


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """A sweep over loads, or a search for the highest one that keeps limits."""

    PANEL: ClassVar = "Sweep"

    sweep_concurrency: Annotated[
        str | None,
        typer.Option(help="Measure at each of these numbers of users, such as 1,2,4,8, or auto."),
    ] = None
    sweep_rate: Annotated[
        str | None,
        typer.Option(
            help="Measure at each of these rates, or auto: from half the rate of one user alone."
        ),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            help='Find the highest load that keeps limits in ms, such as "ttft:200 tpot:50".'
        ),
    ] = None
    slo_by: Annotated[str, typer.Option(help="rate or concurrency.")] = "rate"
    slo_share: Annotated[float, typer.Option(help="Share of the requests that must be within.")] = (
        0.95
    )

    @property
    def is_asked_for(self) -> bool:
        return any(
            asked is not None for asked in (self.sweep_concurrency, self.sweep_rate, self.slo)
        )

    def kind(self) -> Kind:
        """What is varied.

        Raises:
            BadInput: two sweeps at once, or limits that are none.
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
