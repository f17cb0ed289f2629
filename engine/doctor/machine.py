"""Machine report: software versions, CPU, memory, CUDA devices, kernels."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ...quant.native.build import cache_folder, parallel_start
from ..base.host import available_memory_bytes, cpu_model, thread_limit, usable_cores
from ..base.topology import place, read_topology
from ..kernels.common.thread_choice import ThreadChoice, choose_threads
from ..kernels.linear.native_linear import has_bf16, native_linear
from .kernel_table import table

PACKAGES = ("llmopt", "torch", "transformers")
# CPU features that the kernels use, and the probes of torch for them.
FEATURES = {
    "bfloat16 products": "_is_avx512_bf16_supported",
    "8-bit dot products": "_is_vnni_supported",
    "matrix tiles": "_is_amx_tile_supported",
}


def examine() -> dict[str, Any]:
    """The report of `llmopt doctor`, as plain JSON values; memory in bytes."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *([torch.device("cuda")] if gpus else [])]
    has_mps = torch.backends.mps.is_available()
    devices += [torch.device("mps")] if has_mps else []
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "threads": _threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "features": [name for name, probe in FEATURES.items() if _has(probe)],
        },
        "native": _native(),
        "memory": {
            "total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "available_bytes": available_memory_bytes(),
        },
        "cuda": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "capability": f"{gpu.major}.{gpu.minor}",
            }
            for gpu in gpus
        ],
        "mps": {"memory_bytes": torch.mps.recommended_max_memory()} if has_mps else None,
        "kernels": [
            _kernels(device, dtype)
            for device in devices
            for dtype in (torch.bfloat16, torch.float32)
        ],
    }


def _threads() -> dict[str, Any]:
    """The topology, and the threads that the engine would take by default, with what they rest on."""
    topology = read_topology()
    placement = place(topology)
    limit = thread_limit()
    most = min(placement.num_threads, limit or placement.num_threads)
    choice = choose_threads(most) if limit is None else ThreadChoice(most, reason="OMP_NUM_THREADS")
    return {
        "physical_cores": len(topology.cores),
        "hardware_threads": len(topology.cpus),
        "nodes": len(topology.nodes),
        "node": placement.node,
        "quota": topology.quota,
        "chosen": choice.num_threads,
        "step_seconds": dict(choice.seconds),
        "reason": choice.reason,
    }


def _native() -> dict[str, Any]:
    """The C kernels: the instruction-set path they are compiled for, or why there are none."""
    build = native_linear()
    return {
        "path": build.path,
        "reason": build.reason,
        "bfloat16_products": has_bf16(),
        "threads": parallel_start().name,
        "cache": str(cache_folder()),
    }


def _kernels(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "operations": [
            {
                "operation": choice.operation,
                "situation": choice.kernel_query,
                "chosen": choice.chosen,
                "candidates": [
                    {"name": name, "refused": reason} for name, reason in choice.reasons
                ],
            }
            for choice in table(device, dtype)
        ],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _has(probe: str) -> bool:
    """Calls a probe of torch; they are private and differ between its releases."""
    has = getattr(torch.cpu, probe, None)
    return bool(has and has())
