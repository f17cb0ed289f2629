"""Experiment trackers: a finished run folder logged to MLflow or Weights & Biases by their own libraries.

A tracker that fails does not lose the run.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...base.errors import BadInput
from ...base.extras import import_extra
from ...base.option import option

BATCH = 100  # MLflow's limit of parameters in one request
LONGEST_PARAM = 500
WITHOUT_LOGIN = ("offline", "disabled", "dryrun")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run in a tracker's terms: what was measured and how as text, finite numbers, and the folder, which is
    logged whole. Nested keys are joined by dots."""

    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    folder: Path


@dataclass(frozen=True, slots=True)
class TrackingOptions:
    """Where finished runs are logged."""

    PANEL: ClassVar = "Tracking"

    mlflow_uri: str | None = option(
        None, "Log the run to this MLflow server, database or folder ([mlflow])."
    )
    mlflow_experiment: str = option("llmopt", "MLflow's experiment.")
    wandb_project: str | None = option(
        None, "Log the run to this project of Weights & Biases ([wandb])."
    )
    wandb_entity: str | None = option(None, "The project's user or team.")

    def trackers(self) -> list[Tracker]:
        trackers: list[Tracker] = []
        if self.mlflow_uri is not None:
            trackers.append(MlflowTracker(self.mlflow_uri, self.mlflow_experiment))
        if self.wandb_project is not None:
            trackers.append(WandbTracker(self.wandb_project, self.wandb_entity))
        return trackers


def log_run(trackers: Sequence[Tracker], run: TrackedRun, say: Callable[[str], object]) -> None:
    """Log a written run to each tracker, and say where it is or why it is not there."""
    for tracker in trackers:
        try:
            where = tracker.log(run)
        except Exception as error:  # the run is on disk: whatever a tracker does, it stays
            say(f"not logged to {tracker.name}: {_one_line(error)}; the run is in {run.folder}")
        else:
            say(f"logged to {tracker.name}: {where}")


def of_result(result: Mapping[str, Any], folder: Path) -> TrackedRun:
    """The tracked run of a `result.json`: its identity as parameters; as metrics the numbers of its top
    level, and of `llmopt` quality, memory, energy, SLO share and server metrics."""
    ours = result["llmopt"]
    server = ours.get("server_metrics") or {}
    parts = {key: ours.get(key) for key in ("prefix_cache_hit_rate", "preemptions")}
    parts |= {key: ours.get(key) or {} for key in ("quality", "memory", "energy")}
    parts["slo"] = {"share": (ours.get("slo") or {}).get("share")}
    parts["server"] = {key: server.get(key) for key in ("counters", "gauges")}
    top = {key: value for key, value in result.items() if key != "llmopt"}
    params = {**ours["identity"], "label": result.get("label"), "run_id": ours["run_id"]}
    return TrackedRun(ours["name"], texts(params), numbers({**top, **parts}), folder)


def of_sweep(record: Mapping[str, Any], folder: Path) -> TrackedRun:
    """The tracked run of a load sweep or SLO search: the figures of its knee."""
    kind = record["kind"]
    knee = next((p for p in record["points"] if p[kind] == record["knee"]), {})
    slo = record.get("slo") or {}
    params = texts({**record["identity"], "swept": kind})
    figures = {"knee": {**knee, "load": record["knee"]}, "slo": {"best": slo.get("best")}}
    return TrackedRun(record["name"], params, numbers(figures), folder)


def flattened(part: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in part.items():
        inner = f"{path}.{key}" if path else str(key)
        flat |= flattened(value, inner) if isinstance(value, Mapping) else {inner: value}
    return flat


def texts(part: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in flattened(part).items() if value is not None}


def numbers(part: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of nested mappings."""
    return {
        key: float(value)
        for key, value in flattened(part).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class MlflowTracker:
    """Logs into one experiment of the tracking server, database or folder at `uri`. Raises BadInput: the
    package is missing, or the tracking store cannot be used; before anything is measured."""

    name = "MLflow"

    def __init__(self, uri: str, experiment: str) -> None:
        mlflow = import_extra("--mlflow-uri", "mlflow", "mlflow")
        self._entities: Any = import_extra("--mlflow-uri", "mlflow", "mlflow.entities")
        self._uri = uri
        # By default the library retries for minutes where no server answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name(experiment)
            self._experiment = (
                self._client.create_experiment(experiment) if known is None else known.experiment_id
            )
        except Exception as error:  # its exceptions have no common base outside the library
            raise BadInput(f"--mlflow-uri {uri}: {_one_line(error)}") from error

    def log(self, run: TrackedRun) -> str:
        """Log parameters, metrics and the run folder; returns the run's id with its store."""
        created = self._client.create_run(self._experiment, run_name=run.name)
        run_id, now = created.info.run_id, int(time.time() * 1000)
        entities = self._entities
        metrics = [entities.Metric(_key(k), v, now, 0) for k, v in run.metrics.items()]
        params = [entities.Param(_key(k), v[:LONGEST_PARAM]) for k, v in run.params.items()]
        for start in range(0, max(len(metrics), len(params)), BATCH):
            part = slice(start, start + BATCH)
            self._client.log_batch(run_id, metrics=metrics[part], params=params[part])
        self._client.log_artifacts(run_id, str(run.folder))
        self._client.set_terminated(run_id)
        return f"run {run_id} at {self._uri}"


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class WandbTracker:
    """Logs into one project. `WANDB_MODE=offline` writes locally, for `wandb sync`. Raises BadInput: the
    package is missing, or there is no login; before anything is measured."""

    name = "W&B"

    def __init__(self, project: str, entity: str | None = None) -> None:
        self._wandb = import_extra("--wandb-project", "wandb", "wandb")
        self._project, self._entity = project, entity
        if os.environ.get("WANDB_MODE") in WITHOUT_LOGIN:
            return
        try:
            is_in = self._wandb.login()
        except Exception as error:  # its exceptions have no common base outside the library
            raise BadInput(f"--wandb-project: {_one_line(error)}") from error
        if not is_in:
            raise BadInput("--wandb-project: set WANDB_API_KEY, or WANDB_MODE=offline")

    def log(self, run: TrackedRun) -> str:
        """Log parameters as config, metrics as history and summary, the folder as an artifact."""
        session = self._wandb.init(
            project=self._project,
            entity=self._entity,
            name=run.name,
            config=dict(run.params),
            dir=str(run.folder.parent),
            settings=self._wandb.Settings(silent=True),
        )
        try:
            session.log(dict(run.metrics))
            name = re.sub(r"[^\w.-]+", "-", run.name).strip("-") or "run"  # what W&B takes
            artifact = self._wandb.Artifact(name, type="benchmark")
            artifact.add_dir(str(run.folder))
            session.log_artifact(artifact)
        except BaseException:
            session.finish(exit_code=1)
            raise
        session.finish()
        return session.url or f"offline in {session.dir}"


Tracker = MlflowTracker | WandbTracker
"""Logs a finished run at a place with a `name`; `log` returns where the run is, for people."""
