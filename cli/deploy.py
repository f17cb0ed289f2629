"""`llmopt deploy`: the files that serve a model in a cluster or on one machine, from a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from ..base.atomic_io import check_output, write_atomically
from ..base.option import keywords_of_words, option
from ..engine.deploy.deployment import DeployChoices
from .options.command import From, Words, with_options
from .options.shared import output_option

if TYPE_CHECKING:
    from ..engine.planner.plan import DeploymentPlan


@dataclass(frozen=True, slots=True)
class DeployedPlanOptions:
    """Workload and hardware of a replica."""

    PANEL: ClassVar = "What is served"

    like: str | None = option(
        None, "The model to plan for, a name as in `kv-plan`. Default: the same."
    )
    weights: str | None = option(None, "bf16, fp8, int4 ... Default: as stored.")
    context: str | None = option(
        None, "Tokens per sequence. Default: the model's context.", flag="--ctx"
    )
    sequences: int = option(16, "Concurrent sequences per replica.", flag="--concurrency")
    kv_dtype: str | None = option(None, "bf16, fp8 ... Default: bf16.")
    gpu: str = option("H100 SXM", "A GPU of kv-plan's table, or cpu.")
    tp: int | None = option(
        None,
        "Tensor-parallel size. Default: the fewest GPUs that hold the model.",
        hidden_flags=("--tensor-parallel-size",),
    )


@with_options
def deploy(
    model: Annotated[
        str, typer.Argument(help="Model in the pods: a hub id, or a path in the container.")
    ],
    planned: DeployedPlanOptions,
    cluster: Annotated[Words, From(DeployChoices, but=("model",))],
    output: Path | None = output_option(
        "folder", "Folder to write into. Default: deploy-NAME.", hidden_flags=("--out",)
    ),
    as_json: bool = option(False, "Print the files as JSON.", flag="--json"),
) -> None:
    """Write manifests, a compose file, alert rules and Dockerfiles, as planned."""
    from ..engine.deploy.deploy_files import deploy_files
    from ..engine.deploy.deployment import deployment_for
    from ..engine.planner.catalog import find_model, stored_quantization_of
    from ..engine.planner.devices import choose_devices, counted_name
    from .output.console import emit_json, say, stdout

    choose_devices([counted_name(planned.gpu)[1]], None)  # a wrong name is refused before any work
    choices = DeployChoices(model, **keywords_of_words(DeployChoices, cluster))
    folder = output or Path(f"deploy-{choices.name}")
    check_output(folder, "--output", folder=True)
    stored = stored_quantization_of(find_model(planned.like or model))
    plan = _plan(choices, planned)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    deployment = deployment_for(choices, plan, stored)
    files = deploy_files(deployment)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / path, text.encode())
    if as_json:
        emit_json({"folder": str(folder), "plan": list(deployment.why), "files": files})
        return
    lines = [*deployment.why, f"wrote {len(files)} files into {folder}:"]
    if choices.engine == "llmopt":
        file = f"{folder}/docker/Dockerfile.{'cuda' if deployment.gpus else 'cpu'}"
        lines += [
            f"  pip wheel --no-deps -w {folder}/docker CHECKOUT_OF_LLMOPT",
            f"  docker build -f {file} -t {deployment.image} {folder}/docker",
        ]
    lines += [
        f"  kubectl apply -f {folder}/kubernetes",
        f"  docker compose -f {folder}/compose/compose.yaml up",
    ]
    for line in lines:
        say(line, stdout)


def _plan(choices: DeployChoices, planned: DeployedPlanOptions) -> DeploymentPlan:
    from ..engine.config.plan_options import PlanRequest
    from ..engine.planner.plan_request import plan_for

    options = asdict(planned)
    like, gpu = options.pop("like"), options.pop("gpu")
    options["engine"] = choices.engine
    return plan_for(PlanRequest(model=like or choices.model, gpus=(gpu,), **options))
