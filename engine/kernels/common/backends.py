"""Kernels of other libraries (extra `cuda-kernels`): installed packages, builds of the hub's `kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ....quant.base.errors import first_line


@dataclass(frozen=True, slots=True)
class Backend:
    """A module with kernels; `reason`: why there is none."""

    module: Any = None
    reason: str | None = None


@cache
def hub_kernel(repository: str) -> Backend:
    """The kernels of a repository of the hub, built for this torch and CUDA: fetched once, then cached."""
    if find_spec("kernels") is None:
        return Backend(reason="needs the extra cuda-kernels")
    try:
        return Backend(import_module("kernels").get_kernel(repository))
    except (
        Exception
    ) as problem:  # the hub, its cache, a build that is missing, a library that does not load
        return Backend(reason=f"{repository}: {type(problem).__name__}: {first_line(problem)}")


@cache
def package(name: str) -> Backend:
    """An installed package."""
    if find_spec(name) is None:
        return Backend(reason=f"{name} is not installed")
    try:
        return Backend(import_module(name))
    except Exception as problem:
        return Backend(reason=f"{name}: {type(problem).__name__}: {first_line(problem)}")


def refuses_device(device: str, majors: tuple[int, ...]) -> str | None:
    """The reason why a backend for GPUs of these compute capabilities does not support a device, or None."""
    if device != "cuda" or not torch.cuda.is_available():
        return "it is a CUDA library"
    major, minor = torch.cuda.get_device_capability()
    if major not in majors:
        supported = ", ".join(f"{each}.x" for each in majors)
        return f"it has no build for compute capability {major}.{minor} ({supported})"
    return None
