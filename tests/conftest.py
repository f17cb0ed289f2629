"""Run Triton's interpreter where no GPU is, choose what `make test` runs, and spend no time on what no test sees."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from .support.tiers import mark_unswept

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

os.fsync = lambda fd: None  # no test cuts the power; those that count durable steps wrap it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unswept(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the garbage collector off the modules and the collected tests, which live until the end."""
    gc.collect()
    gc.freeze()
