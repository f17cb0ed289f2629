"""Variable machine state: load average, clocks, governor, temperatures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...engine.base.nvml import CLOCK_MEMORY, CLOCK_SM, Nvml

SYS = Path("/sys")


def machine_state(device: str, sys: Path = SYS) -> dict[str, Any]:
    """Load, processor clocks in MHz, governor, temperatures in °C, and GPU state; None where unreadable."""
    found: dict[str, Any] = {
        "load_average": list(os.getloadavg()),
        "cpu_mhz": cpu_clocks(),
        "governor": governors(sys),
        "temperature_celsius": temperatures(sys),
    }
    if device.startswith("cuda"):
        found["gpu"] = gpu_state(device)
    return found


def cpu_clocks(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[float] | None:
    """Lowest and highest current CPU clock."""
    try:
        lines = cpuinfo.read_text().splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return [min(clocks), max(clocks)] if clocks else None


def governors(sys: Path = SYS) -> str | None:
    """The frequency governors in use."""
    names = set()
    for path in sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"):
        try:
            names.add(path.read_text().strip())
        except OSError:
            return None
    return ", ".join(sorted(names)) or None


def temperatures(sys: Path = SYS) -> float | None:
    """The hottest thermal zone."""
    found = []
    for path in sys.glob("class/thermal/thermal_zone*/temp"):
        try:
            found.append(int(path.read_text()) / 1000)
        except (OSError, ValueError):
            continue
    return max(found, default=None)


def gpu_state(device: str) -> dict[str, Any] | None:
    """Driver, clocks, temperature and power limit of the engine's GPU; None without NVML."""
    try:
        nvml = Nvml(int(device.partition(":")[2] or 0))
    except OSError:
        return None
    return {
        "driver": nvml.driver(),
        "sm_mhz": nvml.clock_mhz(CLOCK_SM),
        "memory_mhz": nvml.clock_mhz(CLOCK_MEMORY),
        "temperature_celsius": nvml.temperature_celsius(),
        "power_limit_watts": nvml.power_limit_watts(),
    }
