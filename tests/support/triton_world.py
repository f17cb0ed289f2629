"""Where Triton's kernels are tested: on the GPU, and where there is none in its interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.common.devices import interpret

pytest.importorskip("triton", reason="Triton is for Linux alone")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    assert interpret(), "somebody imported Triton before tests/conftest.py"
