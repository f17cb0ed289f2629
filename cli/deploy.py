"""`llmopt deploy`: from a plan to the files that put a server on a cluster, or on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PLAN, CLUSTER = "What is served", "Cluster"


def deploy(
    model: Annotated[str, typer.Argument(help="What the pods load: a hub id, or a path there.")],
    like: Annotated[
        str | None,
        typer.Option(
            help="The model to plan for, as `kv-plan` knows it. Default: the same.",
            rich_help_panel=PLAN,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="bf16, fp8, int4 ... Default: as stored.", rich_help_panel=PLAN),
    ] = None,
    ctx: Annotated[
        str | None,
        typer.Option(help="Tokens of each sequence. Default: the most.", rich_help_panel=PLAN),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Sequences at once on a replica.", rich_help_panel=PLAN)
    ] = 16,
    kv_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8 ... Default: bf16.", rich_help_panel=PLAN)
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="A GPU of kv-plan's table, or cpu.", rich_help_panel=PLAN)
    ] = "H100 SXM",
    tp: Annotated[
        int | None,
        typer.Option(
            help="GPUs that share each layer. Default: as few as hold it.", rich_help_panel=PLAN
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="vllm or llmopt.", rich_help_panel=PLAN)] = "vllm",
    image: Annotated[
        str | None,
        typer.Option(help="Container image. Default: vLLM's own.", rich_help_panel=CLUSTER),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of the service. Default: the model's.", rich_help_panel=CLUSTER),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Of Kubernetes.", rich_help_panel=CLUSTER)
    ] = "default",
    api_key_secret: Annotated[
        str | None,
        typer.Option(
            help="A secret whose entry api-key clients must show.", rich_help_panel=CLUSTER
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="At least.", rich_help_panel=CLUSTER)] = 1,
    max_replicas: Annotated[int, typer.Option(help="At most.", rich_help_panel=CLUSTER)] = 4,
    queue_target: Annotated[
        int,
        typer.Option(
            help="Waiting requests of a replica beyond which one more comes.",
            rich_help_panel=CLUSTER,
        ),
    ] = 4,
    gpus_per_node: Annotated[
        int, typer.Option(help="GPUs of a machine.", rich_help_panel=CLUSTER)
    ] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write into. Default: deploy-NAME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Write Kubernetes manifests and a compose file for a server that a plan is made for."""
    import re

    from ..engine.deploy.deploy_files import deploy_files
    from ..engine.deploy.deployment import Choices, deployment_for
    from ..engine.planner.plan.ask import Ask, plan_for
    from ..quant.base.durable import write_durably
    from .output.console import emit_json, people, result_console

    short = re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")
    choices = Choices(
        model=model,
        name=name or short[:53].strip("-"),
        engine=engine,
        image=image,
        namespace=namespace,
        key_secret=api_key_secret,
        replicas=replicas,
        max_replicas=max_replicas,
        queue_target=queue_target,
        gpus_per_node=gpus_per_node,
    )
    plan = plan_for(
        Ask(
            model=like or model,
            weights=weights,
            context=ctx,
            sequences=concurrency,
            kv_dtype=kv_dtype,
            gpus=(gpu,),
            tp=tp,
            engine=engine,
        )
    )
    for warning in plan.warnings:
        people.print(f"warning: {warning}", markup=False, soft_wrap=True)
    deployment = deployment_for(choices, plan)
    files = deploy_files(deployment)
    folder = out or Path(f"deploy-{choices.name}")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_durably(folder / path, text.encode())
    if as_json:
        emit_json({"folder": str(folder), "plan": list(deployment.why), "files": files})
        return
    console = result_console(as_json)
    for line in deployment.why:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"wrote {len(files)} files into {folder}:", markup=False, soft_wrap=True)
    console.print(f"  kubectl apply -f {folder}/kubernetes", markup=False, soft_wrap=True)
    console.print(
        f"  docker compose -f {folder}/compose/compose.yaml up", markup=False, soft_wrap=True
    )
