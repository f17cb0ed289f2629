"""Kernel self-tests and measured ceilings of all devices: `llmopt doctor --self-test`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ...engine.doctor.self_test import self_test
from .ceilings import device_roofs


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
