"""Run Triton's interpreter where no GPU is, choose what `make test` runs, and spend no time on what no test sees."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
from llmopt.quant.base.device import cuda_problem, has_nvidia_gpu

from .support.tiers import mark_unswept

GPU_PROBLEM = cuda_problem()
if GPU_PROBLEM is not None:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

with contextlib.suppress(ImportError):  # `make gpu-check` runs without it
    from hypothesis import HealthCheck, settings

    # Hypothesis fails an example after 200 ms, and a test whose examples are drawn slowly: measured times.
    settings.register_profile(
        "unmeasured", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unmeasured")

os.fsync = lambda fd: None  # no test cuts the power; those that count durable steps wrap it


def pytest_report_header() -> str | None:
    """Say in a line why a GPU that is there is not tested."""
    if GPU_PROBLEM is None or not has_nvidia_gpu():
        return None
    return f"on the CPU, as its GPU cannot be used: {GPU_PROBLEM}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unswept(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the garbage collector off the modules and the collected tests, which live until the end."""
    gc.collect()
    gc.freeze()
