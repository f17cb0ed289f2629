"""`llmopt deploy`: what is planned for, and the cluster it goes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .groups import Hidden


@dataclass(frozen=True, slots=True)
class DeployedPlanOptions:
    """What a replica serves, and on what."""

    PANEL: ClassVar = "What is served"

    like: Annotated[
        str | None,
        typer.Option(help="The model to plan for, as `kv-plan` knows it. Default: the same."),
    ] = None
    weights: Annotated[str | None, typer.Option(help="bf16, fp8, int4 ... Default: as stored.")] = (
        None
    )
    context: Annotated[
        str | None, typer.Option("--ctx", help="Tokens of each sequence. Default: the most.")
    ] = None
    sequences: Annotated[
        int, typer.Option("--concurrency", help="Sequences at once on a replica.")
    ] = 16
    kv_dtype: Annotated[str | None, typer.Option(help="bf16, fp8 ... Default: bf16.")] = None
    gpu: Annotated[str, typer.Option(help="A GPU of kv-plan's table, or cpu.")] = "H100 SXM"
    tp: Annotated[
        int | None,
        typer.Option(help="GPUs that share each layer. Default: as few as hold it."),
        Hidden("--tensor-parallel-size"),
    ] = None
    engine: Annotated[str, typer.Option(help="vllm or llmopt.")] = "vllm"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Names, images and replicas."""

    PANEL: ClassVar = "Cluster"

    image: Annotated[str | None, typer.Option(help="Container image. Default: vLLM's own.")] = None
    name: Annotated[str | None, typer.Option(help="Of the service. Default: the model's.")] = None
    namespace: Annotated[str, typer.Option(help="Of Kubernetes.")] = "default"
    key_secret: Annotated[
        str | None,
        typer.Option("--api-key-secret", help="A secret whose entry api-key clients must show."),
    ] = None
    replicas: Annotated[int, typer.Option(help="At least.")] = 1
    max_replicas: Annotated[int, typer.Option(help="At most.")] = 4
    queue_target: Annotated[
        int, typer.Option(help="Waiting requests of a replica beyond which one more comes.")
    ] = 4
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8


@dataclass(frozen=True, slots=True)
class DeployOutputOptions:
    """Where the files go."""

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write into. Default: deploy-NAME."),
        Hidden("--out"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False
