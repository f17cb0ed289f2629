"""Hardware facts that decide whether two machines are the same: models, microcode, driver, clocks, power.

Only what stays over a reboot: limits of clocks, not the clocks of the moment (`machine_state` has those).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from ...engine.base.host import cpu_model
from ...engine.base.nvml import CLOCK_MEMORY, CLOCK_SM, Nvml
from .machine_state import SYS, governors

CPUINFO = Path("/proc/cpuinfo")


def hardware_facts(device: str, *, cpuinfo: Path = CPUINFO, sys: Path = SYS) -> dict[str, Any]:
    """{fact: value} of this machine, with those of the GPU where `device` is one.

    A fact that the system does not have is left out; one that it has, but does not tell, is None.
    """
    cpu = {
        "cpu_model": cpu_model(),
        "microcode": microcode(cpuinfo),
        "cpu_cores": os.cpu_count(),
        "memory_gib": math.ceil(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    facts: dict[str, Any] = {
        "fingerprint": fingerprint(cpu),
        **cpu,
        "cpu_governor": governors(sys),
        "cpu_max_mhz": cpu_max_mhz(sys),
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    return {**facts, **gpu_facts(device)} if device.startswith("cuda") else facts


def fingerprint(facts: dict[str, Any]) -> str:
    """A hash that is the same after a reboot, and another on a runner of the same name with other parts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def microcode(cpuinfo: Path = CPUINFO) -> str | None:
    """The microcode revision; on Arm the variant and revision of the core. None where there is neither."""
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return None
    fields = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    if revision := fields.get("microcode"):
        return revision
    if "CPU variant" in fields and "CPU revision" in fields:
        return f"{fields['CPU variant']}r{fields['CPU revision']}"
    return None


def cpu_max_mhz(sys: Path = SYS) -> int | None:
    """The highest clock that the frequency governor may choose, over all cores."""
    limits = []
    for path in sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_max_freq"):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            return None
    return max(limits) // 1000 if limits else None


def gpu_facts(device: str) -> dict[str, Any]:
    """Name, memory, driver, power limit and clock settings of a GPU."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    name, memory = properties.name, round(properties.total_memory / 2**30)
    return {"gpu": name, "gpu_memory_gib": memory, **driver_facts(int(device[5:] or 0))}


def driver_facts(index: int, library: Any = None) -> dict[str, Any]:
    """Driver, power limit and application clocks by NVML; all None without it.

    What the card has no setting for is left out. `library` replaces NVML in tests.
    """
    try:
        nvml = Nvml(index, library)
    except OSError:
        return dict.fromkeys(("gpu_driver", "gpu_power_limit_watts", "gpu_sm_mhz"))
    facts = {
        "gpu_driver": nvml.driver(),
        "gpu_power_limit_watts": nvml.power_limit_watts(),
        "gpu_sm_mhz": nvml.application_clock_mhz(CLOCK_SM),
        "gpu_memory_mhz": nvml.application_clock_mhz(CLOCK_MEMORY),
    }
    return {name: value for name, value in facts.items() if value is not None}
