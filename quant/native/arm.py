"""CPU features of aarch64: the kernel's auxiliary vector on Linux, `sysctlbyname` on macOS."""

from __future__ import annotations

import ctypes
import sys

AT_HWCAP, AT_HWCAP2 = 16, 26
HWCAP = {"asimd": 1 << 1, "asimddp": 1 << 20}
HWCAP2 = {"i8mm": 1 << 13, "bf16": 1 << 14}
"""Bits of Linux's `asm/hwcap.h`, under the names that /proc/cpuinfo gives them."""
SYSCTL = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}
"""Names below `hw.optional.arm` on macOS; every arm64 of Apple has NEON."""


def arm_features() -> frozenset[str]:
    """Features of this processor that the C kernels have a path for, by Linux's names."""
    if sys.platform == "darwin":
        return frozenset({"asimd", *(name for name, feature in SYSCTL.items() if _sysctl(feature))})
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return frozenset({"asimd"})  # NEON is part of the architecture's base
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return features_of(getauxval(AT_HWCAP), getauxval(AT_HWCAP2))


def features_of(hwcap: int, hwcap2: int) -> frozenset[str]:
    """The features of two words of the auxiliary vector."""
    words = [(hwcap, HWCAP), (hwcap2, HWCAP2)]
    return frozenset(name for word, bits in words for name, bit in bits.items() if word & bit)


def _sysctl(feature: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = f"hw.optional.arm.{feature}".encode()
    failed = ctypes.CDLL(None).sysctlbyname(
        name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return not failed and value.value == 1
