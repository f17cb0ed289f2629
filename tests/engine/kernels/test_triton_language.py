"""Fixes of Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmopt.engine.kernels.common.devices import interpret

tl = pytest.importorskip("triton.language")
if not interpret():
    pytest.skip("Triton was imported without its interpreter", allow_module_level=True)


def test_a_condition_stays_one_when_it_is_broadcast() -> None:
    """Triton 3.9 takes no mask of integers."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    for value in (True, False):
        condition = interpreter.TensorHandle(np.array([value]), tl.int64)
        mask = builder.create_splat(tl.block_type(tl.int64, [4]), condition)
        assert (mask.dtype, mask.data.dtype) == (tl.int1, np.bool_)
        assert mask.data.tolist() == [value] * 4
    number = interpreter.TensorHandle(np.array([3], np.int32), tl.int32)
    assert builder.create_splat(tl.block_type(tl.int32, [2]), number).data.dtype == np.int32
