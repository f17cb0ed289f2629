"""Options of experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from ...bench.record.tracking import Tracker


@dataclass(frozen=True, slots=True)
class TrackingOptions:
    """Where finished runs are logged."""

    PANEL: ClassVar = "Tracking"

    mlflow_uri: Annotated[
        str | None,
        typer.Option(help="Log the run to this MLflow server, database or folder ([mlflow])."),
    ] = None
    mlflow_experiment: Annotated[str, typer.Option(help="MLflow's experiment.")] = "llmopt"
    wandb_project: Annotated[
        str | None, typer.Option(help="Log the run to this project of Weights & Biases ([wandb]).")
    ] = None
    wandb_entity: Annotated[str | None, typer.Option(help="The project's user or team.")] = None

    def trackers(self) -> list[Tracker]:
        """The trackers, ready to log.

        Raises:
            BadInput: a package is missing, or a store cannot be used.
        """
        if self.mlflow_uri is None and self.wandb_project is None:
            return []
        from ...bench.record.tracking import open_trackers

        return open_trackers(**{field.name: getattr(self, field.name) for field in fields(self)})
