"""`advance_step` on CPU: ctypes bindings of `advance_step.c`, the first launch of a captured decode step."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ....quant.native.build import Native, native


class AdvanceCall(ctypes.Structure):
    """`AdvanceCall` of `advance_step.c`; `follows` is set before each replay."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("token_ids", "positions", "slots", "lengths", "tables", "sampled")
        ],
        *[(name, ctypes.c_int64) for name in ("rows", "width", "block_size", "follows")],
    ]


def native_advance() -> Native:
    """The compiled kernel, or the reason why there is none."""
    return native(Path(__file__).with_name("advance_step.c"))
