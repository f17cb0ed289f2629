"""A pytest plugin: `tensor / number` as CUDA computes it, by the reciprocal (aten's BinaryDivTrueKernel.cu).

A reference that divides by a Python number differs in the last bit on a GPU from a kernel that divides. Tests
that claim equality to the bit have to pass under this, too: `-p tests.support.cuda_division`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def pytest_configure(config: pytest.Config) -> None:
    divide = torch.Tensor.__truediv__

    def times_reciprocal(tensor: torch.Tensor, divisor: Any) -> torch.Tensor:
        is_number = isinstance(divisor, int | float) and not isinstance(divisor, bool)
        if not is_number or divisor == 0 or tensor.dtype not in FLOATS:
            return divide(tensor, divisor)
        # CUDA's accumulation type of these is float32.
        reciprocal = float(np.float32(1) / np.float32(divisor))
        return (tensor.float() * reciprocal).to(tensor.dtype)

    torch.Tensor.__truediv__ = times_reciprocal  # pyright: ignore[reportAttributeAccessIssue]
