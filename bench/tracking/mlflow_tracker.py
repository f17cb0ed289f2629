"""MLflow: one MLflow run per benchmark run, through `MlflowClient`."""

from __future__ import annotations

import os
import re
import time
from importlib import import_module
from typing import Any

from ...quant.base.errors import BadInput
from .tracked_run import TrackedRun

BATCH = 100  # MLflow's limit of parameters in one request
LONGEST_PARAM = 500


class MlflowTracker:
    """Logs into one experiment of the tracking server, database or folder at `uri`.

    Raises:
        BadInput: the package is missing, or the tracking store cannot be used; before anything is measured.
    """

    name = "MLflow"

    def __init__(self, uri: str, experiment: str) -> None:
        try:
            mlflow = import_module("mlflow")
            self._entities: Any = import_module("mlflow.entities")
        except ImportError as error:
            raise BadInput(
                "--mlflow-uri needs MLflow: pip install 'llmopt[mlflow]', or leave the option away"
            ) from error
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
    """The name with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
