"""torch's OpenMP runtime: its entry point, and a bound for how long its idle threads spin."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

from ..base.openmp_spins import OPENMP_SPINS_ARE_BOUNDED

MOST_SPINS = 10_000
"""Rounds of GOMP_SPINCOUNT after which idle threads still leave their cores soon enough."""


@lru_cache(maxsize=1)
def openmp_start() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch has loaded; None if there is none."""
    import torch  # the C kernels are compiled without it

    if not torch.backends.openmp.is_available():
        return None
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    names = dict.fromkeys(line.split(maxsplit=5)[-1] for line in mapped if "omp" in line)
    files = [file for file in names if any(part in file for part in ("gomp", "iomp", "libomp"))]
    for file in sorted(files, key=lambda file: "torch" not in file):
        try:
            start = ctypes.CDLL(file).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(start, ctypes.c_void_p).value
    return None


def sleeps_soon() -> bool:
    """Whether idle OpenMP threads leave their cores to another pool soon."""
    if sys.platform == "darwin" or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return True
    spins = os.environ.get("GOMP_SPINCOUNT", "")
    return OPENMP_SPINS_ARE_BOUNDED and spins.isdigit() and int(spins) <= MOST_SPINS
