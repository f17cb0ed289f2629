"""Support for Triton kernels on a device; Triton itself is imported only where its kernels are used."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec

import torch

VARIABLE = "LLMOPT_TRITON"
"""`off`: no Triton kernels. `interpret`: they also run on the CPU, in Triton's (slow) interpreter."""


def refuses_triton(device: str) -> str | None:
    """The reason why Triton kernels do not support a device type, or None."""
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


MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
"""The bits of the number whose unit in the last place is 1 (128; 1024), in both halves of a word."""


def refuses_rows(device: str, dtype: torch.dtype) -> str | None:
    """The reason why Triton kernels do not support activations of a dtype on a device type, or None."""
    if (reason := refuses_triton(device)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {dtype}"
    return None


@cache
def interpret() -> bool:
    """Switch Triton to its interpreter: the environment must say so before Triton is first imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from .interpreter import patch_interpreter

    return patch_interpreter()


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`: the sizes that `tl.arange` takes."""
    return 1 << (count - 1).bit_length()


def refuses_fp8(device: str) -> str | None:
    """The reason why a device type has no FP8 (e4m3 x e4m3) GEMM, or None."""
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return f"a GPU of compute capability {capability[0]}.{capability[1]} has no FP8"
    return None
