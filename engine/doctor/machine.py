"""Machine report with what torch says: CPU features, CUDA devices, compiled kernels, the kernel table."""

from __future__ import annotations

from typing import Any

import torch

from ...quant.native.build import parallel_start
from ..base.host import thread_limit
from ..kernels.common.thread_choice import choose_threads
from ..kernels.linear.native_linear import has_bf16, native_linear
from .kernel_table import table
from .overview import overview

# CPU features that the kernels use, and the probes of torch for them.
FEATURES = {
    "bfloat16 products": "_is_avx512_bf16_supported",
    "8-bit dot products": "_is_vnni_supported",
    "matrix tiles": "_is_amx_tile_supported",
}


def examine() -> dict[str, Any]:
    """The report of `llmopt doctor --all`, as plain JSON values: the overview, and what torch says."""
    found = overview()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *([torch.device("cuda")] if gpus else [])]
    has_mps = torch.backends.mps.is_available()
    devices += [torch.device("mps")] if has_mps else []
    found["cpu"] |= {
        "threads": _threads(found["cpu"]["threads"]),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": [name for name, probe in FEATURES.items() if _has(probe)],
    }
    found["native"] |= _native()
    return found | {
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


def _threads(most: dict[str, Any]) -> dict[str, Any]:
    """The threads that the engine would take by default of the most that it may, with what they rest on."""
    if thread_limit() is not None:
        return most
    choice = choose_threads(most["chosen"])
    return most | {
        "chosen": choice.num_threads,
        "step_seconds": dict(choice.seconds),
        "reason": choice.reason,
    }


def _native() -> dict[str, Any]:
    """The C kernels that are compiled: what only their library, and torch, say."""
    build = native_linear()
    return {
        "path": build.path,
        "reason": build.reason,
        "bfloat16_products": has_bf16(),
        "threads": parallel_start().name,
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


def _has(probe: str) -> bool:
    """Calls a probe of torch; they are private and differ between its releases."""
    has = getattr(torch.cpu, probe, None)
    return bool(has and has())
