"""Logging of a finished run to every tracker; a tracker that fails does not lose the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .mlflow_tracker import MlflowTracker
from .tracked_run import TrackedRun, Tracker
from .wandb_tracker import WandbTracker


def open_trackers(
    mlflow_uri: str | None = None,
    mlflow_experiment: str = "llmopt",
    wandb_project: str | None = None,
    wandb_entity: str | None = None,
) -> list[Tracker]:
    """The trackers that were asked for, ready to log.

    Raises:
        BadInput: a package is missing, or a store cannot be used.
    """
    trackers: list[Tracker] = []
    if mlflow_uri is not None:
        trackers.append(MlflowTracker(mlflow_uri, mlflow_experiment))
    if wandb_project is not None:
        trackers.append(WandbTracker(wandb_project, wandb_entity))
    return trackers


def log_run(trackers: Sequence[Tracker], run: TrackedRun, say: Callable[[str], object]) -> None:
    """Log a written run to each tracker, and say where it is or why it is not there."""
    for tracker in trackers:
        try:
            where = tracker.log(run)
        except Exception as error:  # the run is on disk: whatever a tracker does, it stays
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            say(f"not logged to {tracker.name}: {reason}; the run is in {run.folder}")
        else:
            say(f"logged to {tracker.name}: {where}")
