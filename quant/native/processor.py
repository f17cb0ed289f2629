"""Instruction paths of the C kernels: AVX2, AVX-VNNI, AVX-512 VNNI; NEON, DotProd, I8MM. Detection and
selection."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..base.errors import BadInput
from .arm import arm_features

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
