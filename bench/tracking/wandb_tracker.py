"""Weights & Biases: one W&B run per benchmark run, with the run folder as an artifact."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import Any

from ...quant.base.errors import BadInput
from .tracked_run import TrackedRun

WITHOUT_LOGIN = ("offline", "disabled", "dryrun")


class WandbTracker:
    """Logs into one project. `WANDB_MODE=offline` writes locally, for `wandb sync`.

    Raises:
        BadInput: the package is missing, or there is no login; before anything is measured.
    """

    name = "W&B"

    def __init__(self, project: str, entity: str | None = None) -> None:
        try:
            self._wandb: Any = import_module("wandb")
        except ImportError as error:
            raise BadInput(
                "--wandb-project needs wandb: pip install 'llmopt[wandb]', or leave the option away"
            ) from error
        self._project, self._entity = project, entity
        if os.environ.get("WANDB_MODE") in WITHOUT_LOGIN:
            return
        try:
            is_in = self._wandb.login()
        except Exception as error:  # its exceptions have no common base outside the library
            raise BadInput(f"--wandb-project: {' '.join(str(error).split())[:300]}") from error
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
            artifact = self._wandb.Artifact(artifact_name(run.name), type="benchmark")
            artifact.add_dir(str(run.folder))
            session.log_artifact(artifact)
        except BaseException:
            session.finish(exit_code=1)
            raise
        session.finish()
        return session.url or f"offline in {session.dir}"


def artifact_name(name: str) -> str:
    """The name with the characters that W&B takes."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "run"
