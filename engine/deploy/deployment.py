"""A deployment: a user's choices, facts of the engine's server, and the devices and command line of a plan.

Facts are the image, probes, API key, metrics and KV-cache dtypes; the plan gives memory and startup time too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import ClassVar

from ...base.errors import BadInput
from ...base.option import check_limits, no_less_than, option
from ..planner.cache_size import DEFAULT_UTILIZATION
from ..planner.catalog import StoredQuantization
from ..planner.plan import DeploymentPlan, DevicePlan
from ..server.requests.metric_names import llmopt_metric, sglang_metric, vllm_metric
from .engine_commands import SGLANG, TRTLLM, VLLM, ServerCommand, shown
from .quantization_words import quantization_words

PORT = 8000


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A server in a container. `/health` is each one's liveness.

    Attributes:
        ready_path: path that answers 200 while the server takes new requests.
        metric: the engine's name of a metric of llmopt, None for one that it has not.
        command: None for llmopt's own server.
        metrics_need_key: True if `/metrics` asks for the API key.
        words: arguments that a deployment adds.
        kv_dtypes: value of the engine's option for each KV-cache dtype of the planner, None where no option
            is needed.
    """

    ready_path: str
    metric: Callable[[str], str | None]
    command: ServerCommand | None = None
    metrics_need_key: bool = False
    words: Sequence[str] = ()
    kv_dtypes: Mapping[str, str | None] | None = None

    @property
    def name(self) -> str:
        return "llmopt" if self.command is None else self.command.name

    @property
    def title(self) -> str:
        return "llmopt" if self.command is None else self.command.title

    @property
    def key_variable(self) -> str | None:
        """The environment variable of its API key; None: it takes none from there."""
        return "LLMOPT_API_KEY" if self.command is None else self.command.key_variable

    @property
    def has_metrics(self) -> bool:
        return self.metric("num_requests_waiting") is not None

    def cache_words(self, kv_dtype: str, stored: StoredQuantization | None) -> Sequence[str]:
        """The option for the planner's dtype of the KV cache. Raises `BadInput`: it has no such cache, or not
        with this checkpoint."""
        if self.name == "trtllm":
            # From the checkpoint, or from a YAML file.
            own = (stored and stored.kv_dtype) or "bf16"
            if kv_dtype != own:
                raise BadInput(
                    f"--kv-dtype {kv_dtype}: TensorRT-LLM takes it from the checkpoint, which has {own}; "
                    "quantize it with --kv-cache fp8 --format modelopt"
                )
            return []
        names = self.kv_dtypes or {}
        if kv_dtype not in names:
            title = "our engine" if self.command is None else self.title
            raise BadInput(f"--kv-dtype {kv_dtype}: {title} has {', '.join(names)}")
        name = names[kv_dtype]
        return [] if name is None else ["--kv-cache-dtype", name]


_OUR_CACHES = {"bf16": "bfloat16", "float32": "float32", "int8": "int8"}
_OUR_CACHES |= {"fp8": "fp8", "fp8_per_token_head": "fp8"}
# CacheDType in vllm/config/cache.py of 0.32.0, less what the planner does not know.
_VLLM_CACHES = {"bf16": None, "f16": "float16", "int8": "int8_per_token_head"}
_VLLM_CACHES |= {name: name for name in ("fp8", "fp8_ds_mla", "fp8_per_token_head", "nvfp4")}
_SGLANG_CACHES = {"bf16": None, "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}

SERVED: Mapping[str, ServedEngine] = {
    engine.name: engine
    for engine in (
        ServedEngine("/ready", llmopt_metric, metrics_need_key=True, kv_dtypes=_OUR_CACHES),
        ServedEngine("/health", vllm_metric, VLLM, kv_dtypes=_VLLM_CACHES),
        ServedEngine(
            "/health",  # 503 while it starts and once it drains; the documents name no `/ready`
            sglang_metric,
            SGLANG,
            words=["--enable-metrics"],
            kv_dtypes=_SGLANG_CACHES,
        ),
        # Its Prometheus metrics have to be switched on in a YAML file, and lack the length of the queue.
        ServedEngine("/health", lambda _: None, TRTLLM),
    )
}


_IMAGES = {  # of vLLM by docs.vllm.ai, "Using Docker", pre-built images, read 2026-11-30
    ("vllm", "nvidia"): f"vllm/vllm-openai:v{VLLM.version}",
    ("vllm", "amd"): f"vllm/vllm-openai-rocm:v{VLLM.version}",
    ("vllm", "cpu"): f"vllm/vllm-openai-cpu:v{VLLM.version}-x86_64",
    ("sglang", "nvidia"): f"lmsysorg/sglang:v{SGLANG.version}",
    ("trtllm", "nvidia"): f"nvcr.io/nvidia/tensorrt-llm/release:{TRTLLM.version}",
}


def served_engine(name: str) -> ServedEngine:
    if name not in SERVED:
        raise BadInput(f"--engine {name}: choose {', '.join(SERVED)}")
    return SERVED[name]


_NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class DeployChoices:
    """User choices; `model` is a hub id or a path in the image. Raises `BadInput`: a name that Kubernetes
    does not take, or a number out of range."""

    PANEL: ClassVar = "Cluster"

    model: str
    engine: str = option("vllm", "vllm, sglang, trtllm or llmopt.", panel="What is served")
    image: str | None = option(None, "Container image. Default: the engine's; llmopt has none.")
    name: str = option("", "Service name. Default: the model's.")
    namespace: str = option("default", "Kubernetes namespace.")
    key_secret: str | None = option(
        None, "Kubernetes secret whose entry api-key clients must send.", flag="--api-key-secret"
    )
    replicas: int = option(1, "Minimum replicas.")
    max_replicas: int = option(4, "Maximum replicas.")
    queue_target: int = option(
        4, "Waiting requests per replica that trigger scale-up.", limit=no_less_than(1)
    )
    max_surge: int = option(
        1,
        "Replicas that a rollout starts before it stops one; 0: one stops first.",
        limit=no_less_than(0),
    )
    drain_seconds: int = option(
        300, "Seconds that requests in flight have when a pod is stopped.", limit=no_less_than(1)
    )
    ttft_target: float = option(
        10.0,
        "Time to first token, in seconds, above which an alert fires.",
        limit=lambda seconds: None if seconds > 0 else "seconds above 0",
    )
    gpus_per_node: int = option(8, "GPUs per node.")

    def __post_init__(self) -> None:
        if not self.name:
            short = re.sub(r"[^a-z0-9]+", "-", Path(self.model).name.lower()).strip("-")
            object.__setattr__(self, "name", short[:53].strip("-"))
        for name in (self.name, self.namespace):
            if not _NAME.fullmatch(name):
                raise BadInput(f"{name!r} is no name for Kubernetes: small letters, digits and -")
        served = served_engine(self.engine)
        if self.image is None and served.command is None:
            raise BadInput(
                f"--engine {self.engine}: give the --image that {served.title} is installed in"
            )
        if self.key_secret is not None and served.key_variable is None:
            raise BadInput(
                f"--api-key-secret: {served.title} reads no key from its environment; put a proxy before it"
            )
        if not 1 <= self.replicas <= self.max_replicas:
            given = f"--replicas {self.replicas}, --max-replicas {self.max_replicas}"
            raise BadInput(f"{given}: need 1 <= --replicas <= --max-replicas")
        check_limits(self, by_flag=True)


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
class ServerDeployment:
    """Parameters of the manifests, in bytes and seconds, and the command line."""

    choices: DeployChoices
    image: str
    command: Sequence[str]
    gpus: int
    gpu_resource: str
    cpus: int
    memory_bytes: int
    download_bytes: int
    startup_seconds: int
    why: Sequence[str]

    @property
    def served(self) -> ServedEngine:
        return served_engine(self.choices.engine)

    @property
    def stop_seconds(self) -> int:
        """Time from the removal of a pod from the service until it is killed: longer than the drain."""
        return STEP_ASIDE_SECONDS + self.choices.drain_seconds + 15


def deployment_for(
    choices: DeployChoices, plan: DeploymentPlan, stored: StoredQuantization | None = None
) -> ServerDeployment:
    """The deployment of the plan's workload on its first device, of a checkpoint quantized as `stored`.
    Raises `BadInput`: the device does not hold it, more than a node's devices are needed for one replica, or
    the engine cannot load the checkpoint on that device."""
    device_plan = plan.devices[0]
    gpus, gpu = device_plan.deployment.gpus, device_plan.gpu
    work = f"{plan.workload.sequences} sequences of {plan.workload.context} tokens"
    if not device_plan.fits:
        raise BadInput(f"{work} do not fit on {gpus} x {gpu}: see llmopt kv-plan")
    if gpus > choices.gpus_per_node:
        raise BadInput(
            f"a replica needs {gpus} x {gpu}, and a node has {choices.gpus_per_node} "
            "(--gpus-per-node): serve it with --engine vllm --ray, or quantize it"
        )
    on_cpu, is_amd = device_plan.device.kind == "cpu", gpu.startswith(("MI", "RX ", "Strix "))
    others = "cpu" if on_cpu else "amd" if is_amd else ""
    vendor = "nvidia" if device_plan.device.capability else others
    if not vendor:
        raise BadInput(f"--gpu {gpu}: manifests are for GPUs of NVIDIA and AMD, and for CPUs")
    if choices.engine == "trtllm" and vendor != "nvidia":
        raise BadInput(f"--engine trtllm --gpu {gpu}: it runs on NVIDIA GPUs alone")
    if (image := choices.image or _IMAGES.get((choices.engine, vendor))) is None:
        title = served_engine(choices.engine).title
        raise BadInput(f"no image of {title} is known for {gpu}: give --image")
    weights = plan.weight_bytes
    # On GPUs the weights of one rank are in host memory while they load, on a CPU everything stays there.
    memory = BASE_MEMORY_BYTES + weights + device_plan.kv_bytes
    if not on_cpu:
        memory = BASE_MEMORY_BYTES + MEMORY_BYTES_PER_GPU * gpus + SHARED_MEMORY_BYTES
        memory += device_plan.weight_bytes
    why = [
        f"{plan.model.name}, {plan.recipe.name}: {weights / GIB:.1f} GiB of weights on {gpus} x {gpu}",
        f"{work} take {device_plan.kv_bytes / GIB:.1f} GiB of KV cache a device; "
        f"{device_plan.max_concurrent_sequences} would fit",
    ]
    if stored is not None:
        cache = f", KV cache {stored.kv_dtype}" if stored.kv_dtype else ""
        why.append(f"the checkpoint is in {stored.label}{cache}")
    if choices.max_surge == 0 and choices.replicas == 1:
        why.append(
            "--max-surge 0 with one replica: a rollout is an outage while the new one starts"
        )
    return ServerDeployment(
        choices=choices,
        image=image,
        command=[
            *container_command(choices, plan, device_plan, stored),
            *quantization_words(choices.engine, stored, device_plan.device),
        ],
        gpus=0 if on_cpu else gpus,
        gpu_resource=f"{vendor}.com/gpu",
        cpus=BASE_CPUS + CPUS_PER_GPU * gpus,
        memory_bytes=memory,
        # The hub's cache: the weights, and room for what else a repository holds.
        download_bytes=ceil(1.2 * weights) + 10 * GIB,
        startup_seconds=300 + ceil(weights / LOADING_BYTES_PER_SECOND),
        why=why,
    )


def container_command(
    choices: DeployChoices,
    plan: DeploymentPlan,
    device_plan: DevicePlan,
    stored: StoredQuantization | None,
) -> Sequence[str]:
    """The command line of the engine's server in a container, as the plan has sized it. Raises `BadInput`:
    the engine has nothing for a choice of the plan."""
    options: dict[str, object] = {
        "host": "0.0.0.0",
        "port": PORT,
        "drain_seconds": choices.drain_seconds,
        "max_model_len": plan.workload.context,
        "max_num_seqs": max(plan.workload.sequences, 1),
    }
    deployment, served = device_plan.deployment, served_engine(choices.engine)
    if deployment.tp > 1:
        options["tensor_parallel_size"] = deployment.tp
    utilization = device_plan.reserve.utilization
    if served.command is None:
        if deployment.pp > 1:
            raise BadInput("--pp: our engine has no pipeline stages; --engine vllm has")
        arguments = ["llmopt", "serve-local", choices.model]
        for name, value in options.items():
            arguments += [shown(name), str(value)]
        if choices.key_secret is None:  # clients know it by the names of its service
            arguments += ["--allowed-host", "*"]
        is_sized = device_plan.device.kind == "cuda" and utilization != DEFAULT_UTILIZATION
    else:
        if deployment.pp > 1:
            options["pipeline_parallel_size"] = deployment.pp
        if "drain_seconds" not in served.command.table:
            del options["drain_seconds"]
        arguments = [*served.command.command(choices.model, options), *served.words]
        is_sized = served.name == "vllm"
    arguments += served.cache_words(plan.workload.kv_dtype, stored)
    if is_sized:
        share = str(utilization) if served.command is None else f"{utilization:g}"
        arguments += ["--gpu-memory-utilization", share]
    return arguments
