"""Environment of a measurement, without host name, user or address: hardware, software, state.

`hardware_facts` holds what stays over a reboot and decides whether two machines are the same (limits of
clocks); `machine_state` has the present clocks, load and temperatures.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...base.processor import CPUINFO, cpu_model
from ...base.version import VERSION
from ...engine.base.host import CLOCK_MEMORY, CLOCK_SM, Nvml, usable_cores
from ...quant.model.checkpoint import gguf_file_of

LIBRARIES = ("llmopt", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")
SECRET_OPTIONS = ("--api-key", "--header", "--serve-args")
WHOLE_HASH_BYTES = 2 << 30
SAMPLE_BYTES, NUM_SAMPLES = 1 << 20, 64
SYS = Path("/sys")


def describe(device: str) -> dict[str, Any]:
    """CPU, memory, GPU, library versions and settings, as plain JSON values."""
    import torch

    facts: dict[str, Any] = {
        "machine": machine_name(device),
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": usable_cores(),
        "cgroup_cpu_max": read_line(Path("/sys/fs/cgroup/cpu.max")),
        "cgroup_memory_max": read_line(Path("/sys/fs/cgroup/memory.max")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: library_version(name) for name in LIBRARIES},
        "torch_threads": torch.get_num_threads(),
        "command": [Path(sys.argv[0]).name, *without_secrets(sys.argv[1:])],
        "commit": commit(),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line with the values of keys and headers removed, as results are shared."""
    words_left, is_secret = [], False
    for word in arguments:
        option, equals, _ = word.partition("=")
        if is_secret:
            words_left.append("...")
        else:
            words_left.append(f"{option}=..." if equals and option in SECRET_OPTIONS else word)
        is_secret = word in SECRET_OPTIONS
    return words_left


def machine_name(device: str) -> str:
    """Machine identity for comparisons: CPU model, usable cores, GPU."""
    name = f"{cpu_model()}, {usable_cores()} CPUs"
    if device.startswith("cuda"):
        import torch

        name += f", {torch.cuda.get_device_name(device)}"
    return name


def read_line(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip()
    return None


def library_version(name: str) -> str | None:
    if name == "llmopt":
        return VERSION
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def commit() -> str | None:
    """The commit of the working folder's repository, with `-dirty` for uncommitted changes."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def checkpoint_hash(folder: Path) -> str:
    """Identity of a checkpoint: a hash of its config and weights, or of its GGUF file. Up to 2 GiB all bytes
    are hashed; beyond, sizes and 64 samples of each shard (prefix `sha256-sampled`)."""
    file = gguf_file_of(folder)
    if file is None:
        files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    else:
        files = [file]
    whole = sum(path.stat().st_size for path in files) <= WHOLE_HASH_BYTES
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as handle:
            if whole:
                while block := handle.read(SAMPLE_BYTES):
                    digest.update(block)
            else:
                for number in range(NUM_SAMPLES):
                    handle.seek(number * max(size - SAMPLE_BYTES, 0) // (NUM_SAMPLES - 1))
                    digest.update(handle.read(SAMPLE_BYTES))
    return f"{'sha256' if whole else 'sha256-sampled'}:{digest.hexdigest()}"


def hardware_facts(device: str, *, cpuinfo: Path = CPUINFO, sys: Path = SYS) -> dict[str, Any]:
    """{fact: value} of this machine, and of the GPU if `device` is one. A fact that the system does not have
    is left out; one that the system has, but does not report, is None."""
    cpu = {
        "cpu_model": cpu_model(),
        "microcode": microcode(cpuinfo),
        "cpu_cores": os.cpu_count(),
        "memory_gib": math.ceil(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    limits = {"cpu_governor": governors(sys), "cpu_max_mhz": cpu_max_mhz(sys)}
    facts = {"fingerprint": fingerprint(cpu), **cpu, **limits}
    facts = {name: value for name, value in facts.items() if value is not None}
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30)}
        facts |= driver_facts(int(device[5:] or 0))
    return facts


def fingerprint(facts: dict[str, Any]) -> str:
    """A hash that is the same after a reboot, and another on a runner of the same name with other parts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def microcode(cpuinfo: Path = CPUINFO) -> str | None:
    """The microcode revision; on Arm the variant and revision of the core, if there is any."""
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
    paths = sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_max_freq")
    with suppress(OSError, ValueError):
        limits = [int(path.read_text()) for path in paths]
        return max(limits) // 1000 if limits else None
    return None


def driver_facts(index: int, library: Any = None) -> dict[str, Any]:
    """Driver, power limit and application clocks by NVML; all None without it. A setting that the card does
    not have is left out. `library` replaces NVML in tests."""
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


def machine_state(device: str, sys: Path = SYS) -> dict[str, Any]:
    """Load, processor clocks in MHz, governor, temperatures in °C, and GPU state; None if unreadable."""
    state: dict[str, Any] = {
        "load_average": list(os.getloadavg()),
        "cpu_mhz": cpu_clocks(),
        "governor": governors(sys),
        "temperature_celsius": temperatures(sys),
    }
    if device.startswith("cuda"):
        state["gpu"] = gpu_state(device)
    return state


def cpu_clocks(cpuinfo: Path = CPUINFO) -> list[float] | None:
    """Lowest and highest current CPU clock."""
    with suppress(OSError, ValueError):
        lines = cpuinfo.read_text().splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        return [min(clocks), max(clocks)] if clocks else None
    return None


def governors(sys: Path = SYS) -> str | None:
    """The frequency governors in use."""
    paths = sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    with suppress(OSError):
        return ", ".join(sorted({path.read_text().strip() for path in paths})) or None
    return None


def temperatures(sys: Path = SYS) -> float | None:
    """The hottest thermal zone."""
    readings = []
    for path in sys.glob("class/thermal/thermal_zone*/temp"):
        with suppress(OSError, ValueError):
            readings.append(int(path.read_text()) / 1000)
    return max(readings, default=None)


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
