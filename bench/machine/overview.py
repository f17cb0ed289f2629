"""Overview of the machine for `llmopt doctor`: facts from its files and packages, and problems. No torch.

Nothing is timed, and one C file is compiled: `kernel_table.py` asks torch and compiles every one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ...base.build import (
    BuildFailed,
    cache_folder,
    compiled,
    compiler_command,
    compiler_version,
    open_library,
)
from ...base.processor import (
    NATIVE,
    PATHS,
    VARIABLE,
    choose_path,
    computes_in_bf16,
    cpu_model,
    processor_flags,
    profile,
)
from ...engine.base.host import (
    LIBRARY,
    Nvml,
    available_memory_bytes,
    cache_bytes,
    place,
    read_topology,
    thread_limit,
    usable_cores,
)
from .environment import library_version

PACKAGES = ("llmopt", "torch", "transformers")
EXTRAS = {
    "ct": "transformers reads compressed-tensors checkpoints",
    "cuda-kernels": "attention and GEMM kernels of other libraries on a GPU",
    "eval": "bench --tasks",
    "gguf": "GGUF files",
    "hub": "data sets of the Hugging Face hub",
    "images": "images of prompts, calibration and workloads",
    "mlflow": "bench reports to MLflow",
    "plots": "pictures in reports",
    "serve": "serve-local, batch, and metrics of the server that bench measures",
}
"""Purpose of each extra of the distribution."""
SMALLEST_KERNELS = Path(__file__).parents[2] / "engine/kernels/elementwise/rows.c"
"""C kernels that show whether the compiler works: every model needs them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the machine or the installation, and what to do about it."""

    what: str
    remedy: str


def overview() -> dict[str, Any]:
    """The report of `llmopt doctor` without `--all`, but for its problems; memory in bytes. Raises BadInput:
    `LLMOPT_NATIVE` names an unknown or unsupported path."""
    known = {flag for path in PATHS for flag in (*path.needs, *dict(path.extras))}
    return {
        "versions": {"python": platform.python_version()}
        | {package: library_version(package) or "not installed" for package in PACKAGES},
        "cpu": {
            "model": cpu_model(),
            "profile": NATIVE if (chosen := profile()) is None else chosen.name,
            "default_dtype": "bfloat16" if computes_in_bf16() else "float32",
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "threads": _threads(),
            "flags": sorted(known & processor_flags()),
            "cache_bytes": cache_bytes(),
        },
        "native": _native(),
        "memory": {
            "total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "available_bytes": available_memory_bytes(),
        },
        "nvidia": _nvidia(),
        "missing": _missing(),
    }


def problems(facts: Mapping[str, Any]) -> list[Problem]:
    """Faults in the facts of `overview` or of `machine.examine`, each with a remedy."""
    faults = []
    for package in facts["missing"]:
        if package["extra"] is None or package["installed"]:
            name, installed = package["package"], package["installed"] or "none"
            what = f"{name} is needed, and {installed} is installed"
            faults.append(Problem(what, f"pip install '{name}'"))
    faults += _native_problems(facts["native"])
    nvidia, torch = facts["nvidia"], facts["versions"]["torch"]
    if nvidia["reason"] is not None:
        faults.append(Problem(f"the GPU's driver: {nvidia['reason']}", "load it, or reinstall it"))
    elif nvidia["gpus"] and torch.endswith("+cpu"):
        what = f"torch {torch} does not use the GPU"
        faults.append(Problem(what, "install a CUDA build of torch"))
    return faults


def _threads() -> dict[str, Any]:
    """The topology, and the most threads that the engine would take."""
    topology = read_topology()
    placement = place(topology)
    limit = thread_limit()
    return {
        "physical_cores": len(topology.cores),
        "hardware_threads": len(topology.cpus),
        "nodes": len(topology.nodes),
        "node": placement.node,
        "quota": topology.quota,
        "chosen": min(placement.num_threads, limit or placement.num_threads),
        "step_seconds": {},
        "reason": "OMP_NUM_THREADS"
        if limit
        else "or fewer, if a made-up step is faster on them: --all times it",
    }


def _native() -> dict[str, Any]:
    """The C kernels: the instruction-set path, or the reason that there is none; compiler and folder."""
    path, compiler, built = choose_path(), None, None
    reason = path if isinstance(path, str) else None
    try:
        version_text = compiler_version(compiler_command()[0]).decode(errors="replace")
        compiler = version_text.partition("\n")[0]
        if not isinstance(path, str):
            built = compiled(SMALLEST_KERNELS, path.compiler_options(processor_flags()))
            open_library(built)
    except (BuildFailed, OSError) as error:
        reason = reason or str(error)
    return {
        "path": None if reason or isinstance(path, str) else path.name,
        "reason": reason,
        "compiler": compiler,
        "cache": str(cache_folder()),
        "is_kept": built is None or built.parent == cache_folder(),
    }


def _nvidia() -> dict[str, Any]:
    """The driver's GPUs, including those hidden from CUDA; `reason`: the error of a driver that is there."""
    facts: dict[str, Any] = {"driver": None, "gpus": [], "reason": None}
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return facts
    try:
        first = Nvml(0, library)
        cards = [first, *(Nvml(index, library) for index in range(1, first.count()))]
    except OSError as error:
        return facts | {"reason": str(error)}
    gpus = [{"name": card.name(), "memory_bytes": card.memory_bytes()} for card in cards]
    return facts | {"driver": first.driver(), "gpus": gpus}


def _missing() -> list[dict[str, Any]]:
    """Packages that are missing, or older or newer than the distribution needs; `extra`: the extra that needs
    it, None for a package that is always needed."""
    missing: dict[str, dict[str, Any]] = {}
    for requirement in map(Requirement, _requirements()):
        marker, installed = requirement.marker, library_version(requirement.name)
        extras = [e for e in ("", *EXTRAS) if marker is None or marker.evaluate({"extra": e})]
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        if extras and not fits:
            needed = f"{requirement.name}{requirement.specifier}"
            about = {"package": needed, "extra": extras[0] or None, "installed": installed}
            missing.setdefault(requirement.name, about)
    return list(missing.values())


def _requirements() -> Sequence[str]:
    """Requirements of the installed distribution, or those of a checkout without extras."""
    try:
        return requires("llmopt") or ()
    except PackageNotFoundError:
        path = Path(__file__).resolve().parents[2] / "pyproject.toml"
        text = path.read_text(encoding="utf-8") if path.is_file() else "[project]"
        return tomllib.loads(text)["project"].get("dependencies", ())


def _native_problems(native: Mapping[str, Any]) -> list[Problem]:
    faults = []
    if native["reason"] is not None:
        if os.environ.get(VARIABLE) == "off":
            remedy = f"unset {VARIABLE}"
        elif isinstance(choose_path(), str):
            remedy = "a processor that has them, or a GPU, is faster"
        elif native["compiler"] is None:
            remedy = "install gcc or clang, or name a compiler by CC"
        else:
            remedy = "name another compiler by CC"
        faults.append(Problem(f"torch serves, and no C kernels: {native['reason']}", remedy))
    if not native["is_kept"]:
        what = f"{native['cache']} cannot be written by this user alone: every start compiles"
        faults.append(Problem(what, "let XDG_CACHE_HOME name a folder of yours"))
    return faults
