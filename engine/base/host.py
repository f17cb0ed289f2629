"""Host resources available to this process: CPU cores, memory, CPU model. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

from .topology import SYSFS, cgroup_memory_bytes, read_topology


def usable_cores(root: Path = SYSFS) -> int:
    """Physical cores that this process may use: its affinity, limited by the cgroup's cpuset and CPU quota
    and by OMP_NUM_THREADS, if set. `root`: where sysfs is mounted."""
    cores = read_topology(root).num_usable
    return min(cores, thread_limit() or cores)


def thread_limit() -> int | None:
    """OMP_NUM_THREADS, if it is a number above 0."""
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(limit) if limit.isdigit() and int(limit) else None


def available_memory_bytes(root: Path = SYSFS) -> int:
    """Memory that can be allocated without swapping, within the cgroup's limit. `root`: where sysfs is."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    left = cgroup_memory_bytes(root)
    return free if left is None else min(free, left)


def give_back_freed_memory() -> None:
    """Return freed memory from the C allocator to the system (`malloc_trim`), if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cpu_model() -> str:
    """The CPU model as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
