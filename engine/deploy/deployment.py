"""Deployment parameters of a plan: devices, memory, startup time, and the server's command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from ...quant.base.errors import BadInput
from ..planner.plan.plan import DevicePlan, Plan
from .choices import Choices
from .container_command import container_command
from .served_engine import ServedEngine, served_engine
from .stored_quantization import StoredQuantization, quantization_words

GIB = 1 << 30
STEP_ASIDE_SECONDS = 5
"""Delay between a pod's removal from the service and SIGTERM, so that no request is routed to it then."""
BASE_MEMORY_BYTES = 8 * GIB
MEMORY_BYTES_PER_GPU = 4 * GIB
BASE_CPUS = 2
CPUS_PER_GPU = 4
SHARED_MEMORY_BYTES = 2 * GIB
LOADING_BYTES_PER_SECOND = 100e6
"""Minimum expected rate of the first download of the weights."""


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
    why: Sequence[str]

    @property
    def served(self) -> ServedEngine:
        return served_engine(self.choices.engine)

    @property
    def stop_seconds(self) -> int:
        """From the removal of a pod from the service until it is killed: longer than the drain."""
        return STEP_ASIDE_SECONDS + self.choices.drain_seconds + 15


def deployment_for(
    choices: Choices, plan: Plan, stored: StoredQuantization | None = None
) -> Deployment:
    """The deployment of the plan's workload on its first device, of a checkpoint quantized as `stored`.

    Raises:
        BadInput: the device does not hold it, more than a node's devices are needed for one replica, or the
            engine cannot load the checkpoint, or not there.
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
    if on_cpu and choices.engine in ("sglang", "trtllm"):
        raise BadInput(
            f"--engine {choices.engine} --gpu cpu: its image is for GPUs; take llmopt or vllm"
        )
    if choices.engine == "trtllm" and device_plan.gpu.startswith("MI"):
        raise BadInput(f"--engine trtllm --gpu {device_plan.gpu}: it runs on NVIDIA GPUs alone")
    weights = plan.weight_bytes
    return Deployment(
        choices=choices,
        image=choices.image or str(served_engine(choices.engine).image),
        command=[
            *container_command(choices, plan, device_plan, stored),
            *quantization_words(choices.engine, stored, device_plan.device),
        ],
        gpus=0 if on_cpu else gpus,
        gpu_resource="amd.com/gpu" if device_plan.gpu.startswith("MI") else "nvidia.com/gpu",
        cpus=BASE_CPUS + CPUS_PER_GPU * gpus,
        memory_bytes=_memory_bytes(plan, device_plan),
        cache_bytes=ceil(1.2 * weights) + 10 * GIB,
        startup_seconds=300 + ceil(weights / LOADING_BYTES_PER_SECOND),
        why=(
            f"{plan.model.name}, {plan.recipe.name}: {weights / GIB:.1f} GiB of weights on "
            f"{gpus} x {device_plan.gpu}",
            f"{plan.workload.sequences} sequences of {plan.workload.context} tokens take "
            f"{device_plan.kv_bytes / GIB:.1f} GiB of KV cache a device; "
            f"{device_plan.max_concurrent_sequences} "
            "would fit",
            *_notes(choices, stored),
        ),
    )


def _notes(choices: Choices, stored: StoredQuantization | None) -> Iterator[str]:
    if stored is not None:
        cache = f", KV cache {stored.kv_dtype}" if stored.kv_dtype else ""
        yield f"the checkpoint is in {stored.label}{cache}"
    if choices.max_surge == 0 and choices.replicas == 1:
        yield "--max-surge 0 with one replica: a rollout is an outage while the new one starts"


def _memory_bytes(plan: Plan, device_plan: DevicePlan) -> int:
    """Host memory of the pod: on GPUs the weights of one rank while they load, on a CPU everything."""
    if device_plan.device.kind == "cpu":
        return BASE_MEMORY_BYTES + plan.weight_bytes + device_plan.kv_bytes
    per_gpu = MEMORY_BYTES_PER_GPU * device_plan.deployment.gpus
    return BASE_MEMORY_BYTES + per_gpu + SHARED_MEMORY_BYTES + device_plan.weight_bytes
