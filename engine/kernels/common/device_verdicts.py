"""The verdict table of the current CUDA device, and the clock that its trials are timed with."""

from __future__ import annotations

import hashlib
import os
import re
import statistics
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ....quant.native.build import cache_folder
from .verdicts import VARIABLE, VerdictTable

KERNELS = Path(__file__).parent.parent
BACKENDS = ("flashinfer-python", "kernels", "deep-gemm")
"""Optional packages whose kernels are candidates: another release is measured anew."""
FLUSH_BYTES = 256 << 20
"""Written before each timed call, so that it begins with a cold L2 cache."""
ROUNDS = 15


def current_verdicts() -> VerdictTable | None:
    """The table of the current CUDA device; None: nothing is tried (`LLMOPT_KERNEL_TRIALS=off`, no CUDA)."""
    if os.environ.get(VARIABLE) == "off" or not torch.cuda.is_available():
        return None
    return _table(torch.cuda.current_device())


@cache
def _table(index: int) -> VerdictTable:
    name = torch.cuda.get_device_name(index)
    return VerdictTable(verdict_file(name, torch.cuda.get_device_capability(index)), seconds_of)


def verdict_file(device_name: str, capability: tuple[int, int]) -> Path:
    """The file of a device, for its driver, this torch and Triton, the backends, and the kernels' sources."""
    facts = [str(capability), torch.__version__, driver_version()]
    facts += [f"{name} {_version(name)}" for name in ("triton", *BACKENDS)]
    digest = hashlib.sha256("\n".join(facts).encode())
    for source in sorted(KERNELS.rglob("*.py")):
        digest.update(source.read_bytes())
    device = re.sub(r"\W+", "-", device_name)
    return cache_folder().parent / "verdicts" / f"{device}-{digest.hexdigest()[:16]}.json"


def driver_version() -> str:
    """Of the NVIDIA driver; "unknown" where it does not say."""
    try:
        lines = Path("/proc/driver/nvidia/version").read_text().splitlines()
    except OSError:
        return "unknown"
    return lines[0] if lines else "unknown"


def seconds_of(call: Callable[[], object]) -> float:
    """Median time of a call on the current device, from a cold L2 cache.

    It is replayed from a graph, as decode steps are, so that its launches are not counted; what cannot be
    captured is timed with them.
    """
    run = _captured(call)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) / 1000


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        torch.cuda.synchronize()
        return call
    return graph.replay


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
