"""Instruction paths of the C kernels that tests can take on this machine."""

from __future__ import annotations

import os

from llmopt.engine.kernels.sampling.argmax import native_argmax
from llmopt.quant.native.processor import PATHS, VARIABLE, processor_flags


def native_paths() -> list[str]:
    """Names of the paths: this processor's, or of those the one that is forced; none without a compiler."""
    if native_argmax().library is None:
        return []
    forced = os.environ.get(VARIABLE, "auto")
    here = [path.name for path in PATHS if path.needs <= processor_flags()]
    return [name for name in here if forced in ("auto", name)]
