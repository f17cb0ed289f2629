"""Hardware and software environment of a measurement, without host name, user or address."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...engine.base.host import cpu_model, usable_cores
from ...quant.model.checkpoint import gguf_file_of

LIBRARIES = ("llmopt", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")
SECRET_OPTIONS = ("--api-key", "--header", "--serve-args")
WHOLE_HASH_BYTES = 2 << 30
SAMPLE_BYTES, NUM_SAMPLES = 1 << 20, 64


def describe(device: str) -> dict[str, Any]:
    """CPU, memory, GPU, library versions and settings, as plain JSON values."""
    import torch

    found: dict[str, Any] = {
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
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with the values of keys and headers removed, as results are shared."""
    found, is_secret = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        if is_secret:
            found.append("...")
        else:
            found.append(f"{option}=..." if equals and option in SECRET_OPTIONS else word)
        is_secret = word in SECRET_OPTIONS
    return found


def machine_name(device: str) -> str:
    """Machine identity for comparisons: CPU model, usable cores, GPU."""
    name = f"{cpu_model()}, {usable_cores()} CPUs"
    if device.startswith("cuda"):
        import torch

        name += f", {torch.cuda.get_device_name(device)}"
    return name


def read_line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def library_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
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
    """Identity of a checkpoint: a hash of its config and weights, or of its GGUF file.

    Up to 2 GiB all bytes are hashed; beyond, sizes and 64 samples of each shard (prefix `sha256-sampled`).
    """
    file = gguf_file_of(folder)
    files = (
        sorted([folder / "config.json", *folder.glob("*.safetensors")]) if file is None else [file]
    )
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


def restart_peak_memory() -> None:
    """Reset the peak of `peak_memory_bytes`, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak since process start is an upper bound


def peak_memory_bytes() -> int:
    """The largest resident size of this process since `restart_peak_memory`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
