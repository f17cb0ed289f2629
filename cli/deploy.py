"""`llmopt deploy`: Kubernetes manifests and a compose file from a plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options.deployment import ClusterOptions, DeployedPlanOptions, DeployOutputOptions
from .options.groups import values_of, with_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..engine.deploy.deployment import Choices, Deployment
    from ..engine.planner.plan.plan import Plan


@with_groups
def deploy(
    model: Annotated[
        str, typer.Argument(help="Model in the pods: a hub id, or a path in the container.")
    ],
    planned: DeployedPlanOptions,
    cluster: ClusterOptions,
    output: DeployOutputOptions,
) -> None:
    """Write Kubernetes manifests and a compose file for serving a model as planned."""
    from ..engine.deploy.deploy_files import deploy_files
    from ..engine.deploy.deployment import deployment_for
    from ..quant.base.atomic_io import write_atomically
    from .output.console import emit_json, people

    choices = _choices(model, planned, cluster)
    plan = _plan(model, planned)
    for warning in plan.warnings:
        people.print(f"warning: {warning}", markup=False, soft_wrap=True)
    deployment = deployment_for(choices, plan)
    files = deploy_files(deployment)
    folder = output.output or Path(f"deploy-{choices.name}")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / path, text.encode())
    if output.as_json:
        emit_json({"folder": str(folder), "plan": list(deployment.why), "files": files})
    else:
        _show(deployment, folder, files)


def _choices(model: str, planned: DeployedPlanOptions, cluster: ClusterOptions) -> Choices:
    from ..engine.deploy.deployment import Choices

    short = re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")
    name = cluster.name or short[:53].strip("-")
    chosen = {**values_of(cluster), "name": name}
    return Choices(model=model, engine=planned.engine, **chosen)


def _plan(model: str, planned: DeployedPlanOptions) -> Plan:
    from ..engine.planner.plan.plan_request import PlanRequest, plan_for

    asked = values_of(planned)
    like, gpu = asked.pop("like"), asked.pop("gpu")
    return plan_for(PlanRequest(model=like or model, gpus=(gpu,), **asked))


def _show(deployment: Deployment, folder: Path, files: Mapping[str, str]) -> None:
    from .output.console import result_console

    console = result_console(as_json=False)
    for line in (
        *deployment.why,
        f"wrote {len(files)} files into {folder}:",
        f"  kubectl apply -f {folder}/kubernetes",
        f"  docker compose -f {folder}/compose/compose.yaml up",
    ):
        console.print(line, markup=False, soft_wrap=True)
