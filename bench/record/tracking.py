"""Experiment tracking: a finished run folder logged to MLflow by its own library; a failure does not lose
the run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...base.errors import BadInput
from ...base.extras import import_extra
from ...base.json_lines import is_number
from ...base.option import option

BATCH = 100  # MLflow's limit of parameters in one request
LONGEST_PARAM = 500


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

    def tracker(self) -> MlflowTracker | None:
        if self.mlflow_uri is None:
            return None
        return MlflowTracker(self.mlflow_uri, self.mlflow_experiment)


def log_run(tracker: MlflowTracker | None, run: TrackedRun, say: Callable[[str], object]) -> None:
    """Log a written run to the tracker, if any, and say where it is or why it is not there."""
    if tracker is None:
        return
    try:
        where = tracker.log(run)
    except Exception as error:  # the run is on disk: whatever a tracker does, it stays
        say(f"not logged to MLflow: {_one_line(error)}; the run is in {run.folder}")
    else:
        say(f"logged to MLflow: {where}")


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
    return {key: float(value) for key, value in flattened(part).items() if is_number(value)}


class MlflowTracker:
    """Logs into one experiment of the tracking server, database or folder at `uri`. Raises BadInput: the
    package is missing, or the tracking store cannot be used; before anything is measured."""

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
