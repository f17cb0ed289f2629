"""Options of `llmopt deploy`, and the output of `llmopt kv-plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...quant.base.option import option


@dataclass(frozen=True, slots=True)
class PlanOutputOptions:
    """Output options."""

    PANEL: ClassVar = "Output"

    explain: bool = option(False, "Each formula with its numbers.", flag="--explain")
    output: Path | None = option(
        None,
        "Write the plan as JSON to this file.",
        flag="--output -o",
        hidden_flags=("--out",),
        writes="file",
    )
    html: Path | None = option(None, "Write the plan as a page.", writes="file")
    as_json: bool = option(False, "Print the plan as JSON.", flag="--json")


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
    engine: str = option("vllm", "vllm, sglang, trtllm or llmopt.")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Names, images and replicas."""

    PANEL: ClassVar = "Cluster"

    image: str | None = option(None, "Container image. Default: the engine's; llmopt has none.")
    name: str | None = option(None, "Service name. Default: the model's.")
    namespace: str = option("default", "Kubernetes namespace.")
    key_secret: str | None = option(
        None, "Kubernetes secret whose entry api-key clients must send.", flag="--api-key-secret"
    )
    replicas: int = option(1, "Minimum replicas.")
    max_replicas: int = option(4, "Maximum replicas.")
    queue_target: int = option(4, "Waiting requests per replica that trigger scale-up.")
    max_surge: int = option(
        1, "Replicas that a rollout starts before it stops one; 0: one stops first."
    )
    drain_seconds: int = option(300, "Seconds that requests in flight have when a pod is stopped.")
    ttft_target: float = option(
        10.0, "Time to first token, in seconds, above which an alert fires."
    )
    gpus_per_node: int = option(8, "GPUs per node.")


@dataclass(frozen=True, slots=True)
class DeployOutputOptions:
    """Where the files go."""

    output: Path | None = option(
        None,
        "Folder to write into. Default: deploy-NAME.",
        flag="--output -o",
        hidden_flags=("--out",),
        writes="folder",
    )
    as_json: bool = option(False, "Print the files as JSON.", flag="--json")
