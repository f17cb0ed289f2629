"""How long idle threads of torch's OpenMP spin, told before torch is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

OPENMP_SPINS = "2000"
"""GOMP_SPINCOUNT: idle threads of torch's operations spin for about 0.1 ms, not for 10, and then sleep."""


def _bound_openmp_spins() -> bool:
    """Tell torch's OpenMP to leave idle cores to the C kernels' threads; whether torch will read it.

    What the user has set counts. A runtime reads its environment when it is loaded, with torch.
    """
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in os.environ:
        return "GOMP_SPINCOUNT" in os.environ
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    return True


def without_openmp_spins(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of another engine's process, which is measured as its user would start it."""
    bounded = {"GOMP_SPINCOUNT": OPENMP_SPINS}.items()
    return {name: value for name, value in environment.items() if (name, value) not in bounded}


OPENMP_SPINS_ARE_BOUNDED = _bound_openmp_spins()
