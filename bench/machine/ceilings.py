"""Measured roofline ceilings: memory bandwidth and peak matmul FLOP/s; health of all devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...engine.doctor.self_test import self_test
from ...engine.kernels.common.cpu_measurements import CpuRoofs, NoRoofs

FAR_BYTES = 256 << 20
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
SECONDS_EACH = 0.15
MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured roofline ceilings of one device.

    Attributes:
        far_bandwidth: bytes/s of reading a buffer too large for any cache.
        near_bandwidth: bytes/s of repeatedly reading a buffer of the model's size.
        near_bytes: the size of that buffer.
        peak_flops: FLOP/s of a large matmul, by dtype.
    """

    far_bandwidth: float
    near_bandwidth: float
    near_bytes: int
    peak_flops: dict[str, float]

    @property
    def bandwidth(self) -> float:
        """The bandwidth ceiling for this model; that of a cache, if its weights fit one."""
        return max(self.far_bandwidth, self.near_bandwidth)

    @property
    def flops(self) -> float:
        return max(self.peak_flops.values())


def measure_ceilings(device: torch.device, dtype: torch.dtype, model_bytes: int) -> Ceilings:
    """Measure the ceilings in well under two seconds, with torch's current number of threads."""
    near_bytes = max(model_bytes, 1 << 16)
    sides = {torch.float32, dtype}
    return Ceilings(
        far_bandwidth=read_bandwidth(device, FAR_BYTES),
        near_bandwidth=read_bandwidth(device, min(near_bytes, FAR_BYTES)),
        near_bytes=near_bytes,
        peak_flops={str(d).removeprefix("torch."): matmul_flops(device, d) for d in sides},
    )


def device_roofs(device: torch.device) -> dict[str, float]:
    """Ceilings for `llmopt doctor`, by name: copy bandwidth and matmul peak through torch; on a CPU with C
    kernels also the read bandwidth of a plain loop, and 8-bit operations per second in registers."""
    found = {
        "copy_bytes_per_second": copy_bandwidth(device),
        "bfloat16_flops": matmul_flops(device, torch.bfloat16),
    }
    if device.type != "cpu":
        return found
    try:
        roofs = CpuRoofs(torch.get_num_threads())
    except NoRoofs:
        return found
    for _ in range(5):
        roofs.measure()
    return found | {
        "read_bytes_per_second": max(roofs.bytes),
        "int8_operations_per_second": max(roofs.operations),
    }


def read_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second read by a sum over float32 values."""
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / best_seconds(lambda: values.sum(), device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of copying a large buffer."""
    num_bytes = COPIED_BYTES.get(device.type, FAR_BYTES)
    if device.type == "cuda":  # small cards, and those that others use
        free, _ = torch.cuda.mem_get_info(device)
        num_bytes = min(num_bytes, free // 4 // 4 * 4)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / best_seconds(lambda: target.copy_(source), device)


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matmul; a multiply-add counts as two."""
    side = MATRIX_SIDE.get(device.type, 1024)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / best_seconds(lambda: left @ right, device)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of the repetitions that fit in `SECONDS_EACH`, after one warm-up."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - start

    once()
    best, spent = once(), 0.0
    while spent < SECONDS_EACH:
        seconds = once()
        best, spent = min(best, seconds), spent + seconds
    return best


def check_health() -> dict[str, Any]:
    """Every device with its tests and ceilings, as plain JSON values; `passed` covers all tests."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices = []
    for device in map(torch.device, kinds):
        dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
        # Before the tests: a failing kernel may leave the device unusable.
        roofs = device_roofs(device)
        findings = [finding for dtype in dtypes for finding in self_test(device, dtype)]
        devices.append(
            {
                "device": device.type,
                "roofs": roofs,
                "tests": [asdict(one) | {"passed": one.passed} for one in findings],
            }
        )
    tests = [test for device in devices for test in device["tests"]]
    return {"passed": all(test["passed"] for test in tests), "devices": devices}
