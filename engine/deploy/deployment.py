"""Deployment parameters of a plan: devices, memory, startup time, and the server's command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from ...quant.base.errors import BadInput
from ..planner.memory.cache_size import DEFAULT_UTILIZATION
from ..planner.plan.plan import DevicePlan, Plan
from .vllm_command import VLLM

GIB = 1 << 30
PORT = 8000
VLLM_IMAGE = f"vllm/vllm-openai:v{VLLM.version}"
DRAIN_SECONDS = 30
STEP_ASIDE_SECONDS = 5
"""Delay between a pod's removal from the service and SIGTERM, so that no request is routed to it then."""
BASE_MEMORY_BYTES = 8 * GIB
MEMORY_BYTES_PER_GPU = 4 * GIB
BASE_CPUS = 2
CPUS_PER_GPU = 4
SHARED_MEMORY_BYTES = 2 * GIB
LOADING_BYTES_PER_SECOND = 100e6
"""Minimum expected rate of the first download of the weights."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Choices:
    """User choices; the rest follows from the plan.

    Attributes:
        model: that the pods load, a hub id or a path in the image.
        key_secret: Kubernetes secret whose entry `api-key` is the API key; None: no API key.
        replicas, max_replicas: minimum and maximum number.
        queue_target: waiting requests per replica above which the autoscaler adds replicas.
    """

    model: str
    name: str
    engine: str = "vllm"
    image: str | None = None
    namespace: str = "default"
    key_secret: str | None = None
    replicas: int = 1
    max_replicas: int = 4
    queue_target: int = 4
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in (self.name, self.namespace):
            if not _NAME.fullmatch(name):
                raise BadInput(f"{name!r} is no name for Kubernetes: small letters, digits and -")
        if self.engine not in ("llmopt", "vllm"):
            raise BadInput(f"--engine {self.engine}: choose llmopt or vllm")
        if self.engine == "llmopt" and self.image is None:
            raise BadInput("--engine llmopt: give the --image that llmopt is installed in")
        if not 1 <= self.replicas <= self.max_replicas:
            raise BadInput(
                f"--replicas {self.replicas}, --max-replicas {self.max_replicas}: at least 1, and no "
                "more than the most"
            )
        if self.queue_target < 1:
            raise BadInput(f"--queue-target {self.queue_target}: at least 1")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Parameters of the manifests, in bytes and seconds, and the command line."""

    choices: Choices
    image: str
    command: Sequence[str]
    gpus: int
    gpu_resource: str
    cpus: int
    memory_bytes: int
    cache_bytes: int
    startup_seconds: int
    ready_path: str
    why: Sequence[str]

    @property
    def key_variable(self) -> str:
        """The environment variable of the engine's API key."""
        return "VLLM_API_KEY" if self.choices.engine == "vllm" else "LLMOPT_API_KEY"

    @property
    def metric_prefix(self) -> str:
        return "vllm:" if self.choices.engine == "vllm" else "llmopt_"


def deployment_for(choices: Choices, plan: Plan) -> Deployment:
    """The deployment of the plan's workload on its first device.

    Raises:
        BadInput: the device does not hold it, or more than a node's devices are needed for one replica.
    """
    device_plan = plan.devices[0]
    gpus = device_plan.deployment.gpus
    if not device_plan.fits:
        raise BadInput(
            f"{plan.workload.sequences} sequences of {plan.workload.context} tokens do not fit on "
            f"{gpus} x {device_plan.gpu}: see llmopt kv-plan"
        )
    if gpus > choices.gpus_per_node:
        raise BadInput(
            f"a replica needs {gpus} x {device_plan.gpu}, and a node has {choices.gpus_per_node} "
            "(--gpus-per-node): serve it with --engine vllm --ray, or quantize it"
        )
    on_cpu = device_plan.device.kind == "cpu"
    weights = plan.weight_bytes
    return Deployment(
        choices=choices,
        image=choices.image or VLLM_IMAGE,
        command=_command(choices, plan, device_plan),
        gpus=0 if on_cpu else gpus,
        gpu_resource="amd.com/gpu" if device_plan.gpu.startswith("MI") else "nvidia.com/gpu",
        cpus=BASE_CPUS + CPUS_PER_GPU * gpus,
        memory_bytes=_memory_bytes(plan, device_plan),
        cache_bytes=ceil(1.2 * weights) + 10 * GIB,
        startup_seconds=300 + ceil(weights / LOADING_BYTES_PER_SECOND),
        ready_path="/health" if choices.engine == "vllm" else "/ready",
        why=(
            f"{plan.model.name}, {plan.recipe.name}: {weights / GIB:.1f} GiB of weights on "
            f"{gpus} x {device_plan.gpu}",
            f"{plan.workload.sequences} sequences of {plan.workload.context} tokens take "
            f"{device_plan.kv_bytes / GIB:.1f} GiB of KV cache a device; "
            f"{device_plan.max_concurrent_sequences} "
            "would fit",
        ),
    )


def _memory_bytes(plan: Plan, device_plan: DevicePlan) -> int:
    """Host memory of the pod: on GPUs the weights of one rank while they load, on a CPU everything."""
    if device_plan.device.kind == "cpu":
        return BASE_MEMORY_BYTES + plan.weight_bytes + device_plan.kv_bytes
    per_gpu = MEMORY_BYTES_PER_GPU * device_plan.deployment.gpus
    return BASE_MEMORY_BYTES + per_gpu + SHARED_MEMORY_BYTES + device_plan.weight_bytes


def _command(choices: Choices, plan: Plan, device_plan: DevicePlan) -> Sequence[str]:
    asked: dict[str, object] = {
        "host": "0.0.0.0",
        "port": PORT,
        "drain_seconds": DRAIN_SECONDS,
        "max_model_len": plan.workload.context,
        "max_num_seqs": max(plan.workload.sequences, 1),
    }
    deployment, kv_dtype = device_plan.deployment, plan.workload.kv_dtype
    if deployment.tp > 1:
        asked["tensor_parallel_size"] = deployment.tp
    if choices.engine == "vllm":
        if deployment.pp > 1:
            asked["pipeline_parallel_size"] = deployment.pp
        return [
            *VLLM.command(choices.model, asked),
            *([] if kv_dtype == "bf16" else ["--kv-cache-dtype", kv_dtype]),
            *("--gpu-memory-utilization", f"{device_plan.reserve.utilization:g}"),
        ]
    if deployment.pp > 1:
        raise BadInput("--pp: our engine has no pipeline stages; --engine vllm has")
    names = {"bf16": "bfloat16", "float32": "float32", "fp8": "fp8", "int8": "int8"}
    if kv_dtype not in names:
        raise BadInput(f"--kv-dtype {kv_dtype}: our engine has {', '.join(names)}")
    asked["kv_cache_dtype"] = names[kv_dtype]
    if device_plan.device.kind == "cuda" and device_plan.reserve.utilization != DEFAULT_UTILIZATION:
        asked["gpu_memory_utilization"] = device_plan.reserve.utilization
    options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in asked.items()]
    return ["llmopt", "serve-local", choices.model, *(word for pair in options for word in pair)]
