"""The command line of an engine's server in a container, as a plan has sized it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...quant.base.errors import BadInput
from ..planner.memory.cache_size import DEFAULT_UTILIZATION
from ..planner.plan.plan import DevicePlan, Plan
from .choices import Choices
from .served_engine import served_engine
from .stored_quantization import StoredQuantization

PORT = 8000


def container_command(
    choices: Choices, plan: Plan, device_plan: DevicePlan, stored: StoredQuantization | None
) -> Sequence[str]:
    """The words of the command line.

    Raises:
        BadInput: the engine has nothing for a choice of the plan.
    """
    asked: dict[str, object] = {
        "host": "0.0.0.0",
        "port": PORT,
        "drain_seconds": choices.drain_seconds,
        "max_model_len": plan.workload.context,
        "max_num_seqs": max(plan.workload.sequences, 1),
    }
    deployment, kv_dtype = device_plan.deployment, plan.workload.kv_dtype
    if deployment.tp > 1:
        asked["tensor_parallel_size"] = deployment.tp
    served = served_engine(choices.engine)
    if served.command is None:
        return _own_command(choices.model, asked, device_plan, kv_dtype)
    if deployment.pp > 1:
        asked["pipeline_parallel_size"] = deployment.pp
    if "drain_seconds" not in served.command.table:
        del asked["drain_seconds"]
    words = [*served.command.command(choices.model, asked), *served.words]
    words += KV_CACHE_WORDS[served.name](kv_dtype, stored)
    if served.name == "vllm":
        words += ["--gpu-memory-utilization", f"{device_plan.reserve.utilization:g}"]
    return words


def _own_command(
    model: str, asked: dict[str, object], device_plan: DevicePlan, kv_dtype: str
) -> Sequence[str]:
    """The command line of llmopt's server."""
    if device_plan.deployment.pp > 1:
        raise BadInput("--pp: our engine has no pipeline stages; --engine vllm has")
    names = {"bf16": "bfloat16", "float32": "float32", "fp8": "fp8", "int8": "int8"}
    if kv_dtype not in names:
        raise BadInput(f"--kv-dtype {kv_dtype}: our engine has {', '.join(names)}")
    asked["kv_cache_dtype"] = names[kv_dtype]
    if device_plan.device.kind == "cuda" and device_plan.reserve.utilization != DEFAULT_UTILIZATION:
        asked["gpu_memory_utilization"] = device_plan.reserve.utilization
    options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in asked.items()]
    return ["llmopt", "serve-local", model, *(word for pair in options for word in pair)]


def _vllm_cache(kv_dtype: str, _: StoredQuantization | None) -> Sequence[str]:
    return [] if kv_dtype == "bf16" else ["--kv-cache-dtype", kv_dtype]


def _sglang_cache(kv_dtype: str, _: StoredQuantization | None) -> Sequence[str]:
    names = {"bf16": None, "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
    if kv_dtype not in names:
        raise BadInput(f"--kv-dtype {kv_dtype}: SGLang has {', '.join(names)}")
    name = names[kv_dtype]
    return [] if name is None else ["--kv-cache-dtype", name]


def _trtllm_cache(kv_dtype: str, stored: StoredQuantization | None) -> Sequence[str]:
    """It takes the KV cache's dtype from the checkpoint, or from a YAML file."""
    held = (stored and stored.kv_dtype) or "bf16"
    if kv_dtype != held:
        raise BadInput(
            f"--kv-dtype {kv_dtype}: TensorRT-LLM takes it from the checkpoint, which has {held}; quantize "
            "it with --kv-cache fp8 --format modelopt"
        )
    return []


KV_CACHE_WORDS: Mapping[str, Callable[[str, StoredQuantization | None], Sequence[str]]] = {
    "vllm": _vllm_cache,
    "sglang": _sglang_cache,
    "trtllm": _trtllm_cache,
}
