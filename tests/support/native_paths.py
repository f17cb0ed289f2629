"""Instruction paths of the C kernels that tests can take on this machine, and the mark of tests that need one."""

from __future__ import annotations

import os
import platform

import pytest
from llmopt.base.build import BuildFailed, compiler_command
from llmopt.base.processor import PATHS, VARIABLE, processor_flags


def native_paths() -> list[str]:
    """Names of the paths: this processor's, or of those the one that is forced; none without a compiler."""
    try:
        compiler_command()
    except BuildFailed:
        return []
    forced = os.environ.get(VARIABLE, "auto")
    here = [path.name for path in PATHS if path.needs <= processor_flags()]
    return [name for name in here if forced in ("auto", name)]


needs_compiler = pytest.mark.skipif(
    not native_paths(), reason="without a C compiler it takes minutes, or there is nothing to test"
)
needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="profiles are of x86 processors"
)
