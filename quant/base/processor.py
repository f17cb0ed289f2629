"""Instruction paths of the C kernels, their detection and selection: AVX2, AVX-VNNI, AVX-512 VNNI; NEON,
DotProd, I8MM.

An aarch64's features come from the kernel's auxiliary vector on Linux, from `sysctlbyname` on macOS. How long
idle threads of torch's OpenMP spin beside the C kernels is set here, before torch is loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import BadInput

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


def keep_few_gemms() -> None:
    """Bound the caches of oneDNN and of torch's layer over it; call it before the first GEMM.

    Each keeps up to 1,024 GEMMs by their shapes, of a third of a MiB. The batches of a mixture's experts have
    hundreds of sizes, which do not come again before they are dropped.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "32")


VARIABLE = "LLMOPT_NATIVE"


@dataclass(frozen=True, slots=True)
class InstructionPath:
    """An instruction set to compile the kernels for.

    Attributes:
        name: its value of `LLMOPT_NATIVE`.
        needs: flags that the processor must have, by their names in /proc/cpuinfo.
        options: compiler options.
        extras: optional flags, each with its compiler option or macro; the last `-march` counts.
    """

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]
    extras: tuple[tuple[str, str], ...] = ()

    def compiler_options(self, flags: frozenset[str]) -> tuple[str, ...]:
        """Compiler options for a processor with these flags."""
        return self.options + tuple(option for flag, option in self.extras if flag in flags)


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX2_OPTIONS = ("-mavx2", "-mfma", "-mf16c")
PATHS = (
    InstructionPath(
        "avx512vnni",
        _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
        (*_AVX2_OPTIONS, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))),
        (
            ("avx512_bf16", "-mavx512bf16"),
            ("avx512vbmi", "-mavx512vbmi"),
            ("avx512_vbmi2", "-mavx512vbmi2"),
            ("avx512_fp16", "-DHAS_AVX512FP16"),  # an option that gcc 11 does not know
            ("amx_int8", "-DHAS_AMX"),  # used only where the system gives permission
        ),
    ),
    InstructionPath("avxvnni", _AVX2 | {"avx_vnni"}, (*_AVX2_OPTIONS, "-mavxvnni")),
    InstructionPath("avx2", _AVX2, _AVX2_OPTIONS),
    InstructionPath(
        "i8mm",
        frozenset({"asimd", "asimddp", "i8mm"}),
        ("-march=armv8.2-a+dotprod+i8mm",),
        (("bf16", "-march=armv8.2-a+dotprod+i8mm+bf16"),),
    ),
    InstructionPath("dotprod", frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
    InstructionPath("neon", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""Best first, of x86-64 and then of aarch64."""


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """Flags of an x86-64 as /proc/cpuinfo lists them, or features of an aarch64; else empty."""
    if platform.machine() in ("aarch64", "arm64"):
        return arm_features()
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")),
        frozenset(),
    )


def choose_path() -> InstructionPath | str:
    """The instruction path to compile for, or the reason why there is none.

    Raises:
        BadInput: `LLMOPT_NATIVE` names an unknown path, or one that this processor does not support.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted == "off":
        return f"{VARIABLE}=off"
    flags = processor_flags()
    if wanted != "auto":
        path = next((path for path in PATHS if path.name == wanted), None)
        if path is None:
            names = ", ".join(path.name for path in PATHS)
            raise BadInput(f"{VARIABLE}={wanted}: choose auto, off, {names}")
        if missing := sorted(path.needs - flags):
            raise BadInput(f"{VARIABLE}={wanted}: this processor lacks {', '.join(missing)}")
        return path
    path = next((path for path in PATHS if path.needs <= flags), None)
    return path or "the C kernels need an x86 processor with AVX2 and FMA, or an aarch64"


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
