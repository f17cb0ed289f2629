"""Fixtures of the tests that need the real model: `make real` fetches it and names its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The plain checkpoint of SmolLM2-135M-Instruct."""
    folder = os.environ.get("LLMOPT_REAL_MODEL")
    if not folder:
        pytest.skip("needs the real model: make real")
    return Path(folder)
