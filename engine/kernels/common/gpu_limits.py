"""What a GPU gives a kernel: compute capability, multiprocessors, shared memory per program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits of a GPU that launches depend on.

    Attributes:
        capability: compute capability, 90 for 9.0.
        multiprocessors: how many it has.
        shared_bytes: the most shared memory that a program may take.
    """

    capability: int
    multiprocessors: int
    shared_bytes: int


HOPPER = GpuLimits(90, 132, 227 * 1024)
_pretended = HOPPER


def gpu_limits(device: torch.device) -> GpuLimits:
    """The limits of a device; without a GPU, those of `pretended_gpu`, or of an H100."""
    return _limits_of(device.index or 0) if device.type == "cuda" else _pretended


@contextmanager
def pretended_gpu(limits: GpuLimits) -> Iterator[None]:
    """Context in which launches from a CPU are those for this GPU."""
    global _pretended
    before, _pretended = _pretended, limits
    try:
        yield
    finally:
        _pretended = before


@cache
def _limits_of(index: int) -> GpuLimits:
    import triton

    driver: Any = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(index)
    major, minor = torch.cuda.get_device_capability(index)
    return GpuLimits(
        10 * major + minor, properties["multiprocessor_count"], properties["max_shared_mem"]
    )
