"""`llmopt deploy`: the plan's inputs, and the target cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .common import writable_folder
from .groups import Hidden


@dataclass(frozen=True, slots=True)
class DeployedPlanOptions:
    """Workload and hardware of a replica."""

    PANEL: ClassVar = "What is served"

    like: Annotated[
        str | None,
        typer.Option(help="The model to plan for, a name as in `kv-plan`. Default: the same."),
    ] = None
    weights: Annotated[str | None, typer.Option(help="bf16, fp8, int4 ... Default: as stored.")] = (
        None
    )
    context: Annotated[
        str | None, typer.Option("--ctx", help="Tokens per sequence. Default: the model's context.")
    ] = None
    sequences: Annotated[
        int, typer.Option("--concurrency", help="Concurrent sequences per replica.")
    ] = 16
    kv_dtype: Annotated[str | None, typer.Option(help="bf16, fp8 ... Default: bf16.")] = None
    gpu: Annotated[str, typer.Option(help="A GPU of kv-plan's table, or cpu.")] = "H100 SXM"
    tp: Annotated[
        int | None,
        typer.Option(help="Tensor-parallel size. Default: the fewest GPUs that hold the model."),
        Hidden("--tensor-parallel-size"),
    ] = None
    engine: Annotated[str, typer.Option(help="vllm, sglang, trtllm or llmopt.")] = "vllm"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Names, images and replicas."""

    PANEL: ClassVar = "Cluster"

    image: Annotated[
        str | None, typer.Option(help="Container image. Default: the engine's; llmopt has none.")
    ] = None
    name: Annotated[str | None, typer.Option(help="Service name. Default: the model's.")] = None
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace.")] = "default"
    key_secret: Annotated[
        str | None,
        typer.Option(
            "--api-key-secret", help="Kubernetes secret whose entry api-key clients must send."
        ),
    ] = None
    replicas: Annotated[int, typer.Option(help="Minimum replicas.")] = 1
    max_replicas: Annotated[int, typer.Option(help="Maximum replicas.")] = 4
    queue_target: Annotated[
        int, typer.Option(help="Waiting requests per replica that trigger scale-up.")
    ] = 4
    max_surge: Annotated[
        int,
        typer.Option(
            help="Replicas that a rollout starts before it stops one; 0: one stops first."
        ),
    ] = 1
    drain_seconds: Annotated[
        int, typer.Option(help="Seconds that requests in flight have when a pod is stopped.")
    ] = 300
    ttft_target: Annotated[
        float, typer.Option(help="Time to first token, in seconds, above which an alert fires.")
    ] = 10.0
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node.")] = 8


@dataclass(frozen=True, slots=True)
class DeployOutputOptions:
    """Where the files go."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=writable_folder,
            help="Folder to write into. Default: deploy-NAME.",
        ),
        Hidden("--out"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False
