"""Whether Triton's kernels can serve a device; Triton itself is imported by nobody who does not use them."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec

import torch

VARIABLE = "LLMOPT_TRITON"
"""`off`: they serve nothing. `interpret`: they serve the CPU, in Triton's interpreter, which is slow."""


def refuses_triton(device: str) -> str | None:
    """Why no Triton kernel runs on a device of this type, or None."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted == "off":
        return f"{VARIABLE}=off"
    if device != "cuda" and not (device == "cpu" and wanted == "interpret"):
        return "it is a GPU kernel"
    if not _is_installed():
        return "Triton is not installed"
    if wanted == "interpret" and not interpret():
        return "Triton was imported before it was told to interpret: set TRITON_INTERPRET=1"
    return None


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuses_rows(device: str, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel takes rows of this dtype on a device of this type, or None."""
    if (reason := refuses_triton(device)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {dtype}"
    return None


@cache
def interpret() -> bool:
    """Have Triton interpret its kernels: it must be told so before the process imports it first."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from .interpreter import patch_interpreter

    return patch_interpreter()


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def power_of_two(count: int) -> int:
    """The least power of two that holds so many: ranges in Triton have such sizes."""
    return 1 << (count - 1).bit_length()


def refuses_fp8(device: str) -> str | None:
    """Why no kernel multiplies e4m3 by e4m3 on a device of this type, or None."""
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return f"a GPU of compute capability {capability[0]}.{capability[1]} has no FP8"
    return None
