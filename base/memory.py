"""Resident memory of this process, from Linux' /proc, or else `getrusage`."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_peak_memory() -> None:
    """Reset the peak of `peak_memory_bytes`, if the system can: else it is since process start, an upper
    bound."""
    with suppress(OSError):
        CLEAR.write_text("5")


def peak_memory_bytes() -> int:
    """The largest resident size since `restart_peak_memory`."""
    return _bytes_of("VmHWM")


def resident_bytes() -> int:
    """The present resident size, or the largest one where the system tells no other."""
    return _bytes_of("VmRSS")


def _bytes_of(field: str) -> int:
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
