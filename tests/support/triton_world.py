"""Where Triton's kernels are tested: on the GPU, and where there is none in its interpreter on the CPU."""

from __future__ import annotations

import pytest
from llmopt.engine.kernels.common.devices import interpret
from llmopt.quant.base.device import cuda_problem

pytest.importorskip("triton", reason="Triton is for Linux alone")
DEVICE = "cuda" if cuda_problem() is None else "cpu"
if DEVICE == "cpu":
    assert interpret(), "somebody imported Triton before tests/conftest.py"
