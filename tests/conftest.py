"""Run Triton's interpreter where no GPU is, and choose what `make test` runs."""

from __future__ import annotations

import os

import pytest
import torch

from .support.tiers import mark_unswept

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unswept(items)
