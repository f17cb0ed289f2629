"""What this process may use of the machine: cores, memory, the processor's name. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, cut by the control group's quota and by
    OMP_NUM_THREADS, where the user set that."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(cores, int(asked)) if asked.isdigit() and int(asked) else cores


def available_memory_bytes() -> int:
    """Memory that a process can still take without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def give_back_freed_memory() -> None:
    """Return to the system what was freed and the C library keeps for later, where it can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
