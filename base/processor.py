"""Features of the processor, and every decision that rests on them. No other module asks torch or the system.

`LLMOPT_CPU` names a profile of x86 processors. The flags of this machine are then reduced to those of the
profile, and torch, oneDNN, MKL and OpenBLAS are told to do the same through their own variables, which they
read when they are first used. So default dtypes, kernels, compiler options and captured steps are those of a
machine of that kind; the number of cores and the speed of memory remain this machine's.

`LLMOPT_NATIVE` chooses the instruction path of the C kernels alone. An aarch64's features come from
/proc/cpuinfo on Linux, from `sysctlbyname` on macOS. How long idle threads of torch's OpenMP spin
between the calls of C kernels is set here too, before torch is loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import BadInput

ARM_FEATURES = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}
"""Features with paths of the C kernels: names in /proc/cpuinfo, and below `hw.optional.arm` on macOS."""

CPUINFO = Path("/proc/cpuinfo")
PROFILE_VARIABLE = "LLMOPT_CPU"
NATIVE = "native"
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
_ICE_LAKE = _AVX2 | _AVX512 | {"avx512cd", "avx512_vnni", "avx512vbmi", "avx512_vbmi2"}
_SAPPHIRE_RAPIDS = frozenset({"avx_vnni", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of x86 processor, as `LLMOPT_CPU` names it: the flags that it has, by their names in
    /proc/cpuinfo, and the environment that keeps torch, oneDNN, MKL and OpenBLAS to these instructions."""

    name: str
    flags: frozenset[str]
    libraries: Mapping[str, str]


def _libraries(torch: str, onednn: str, mkl: str, openblas: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": torch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OPENBLAS_CORETYPE": openblas,
    }


PROFILES = (
    Profile("generic", frozenset(), _libraries("default", "SSE41", "SSE4_2", "Nehalem")),
    Profile("avx2", _AVX2, _libraries("avx2", "AVX2", "AVX2", "Haswell")),
    Profile("avx512", _ICE_LAKE, _libraries("avx512", "AVX512_CORE_VNNI", "AVX512", "SkylakeX")),
    Profile(
        "avx512_bf16",
        _ICE_LAKE | {"avx512_bf16"},
        _libraries("avx512", "AVX512_CORE_BF16", "AVX512", "SkylakeX"),
    ),
    Profile(
        "amx",
        _ICE_LAKE | {"avx512_bf16"} | _SAPPHIRE_RAPIDS,
        _libraries("avx512", "AVX512_CORE_AMX", "AVX512", "SkylakeX"),
    ),
)
"""Any x86-64; Haswell to Zen 3; Ice Lake and newer Xeons without bfloat16; Zen 4; Sapphire Rapids."""


def profile() -> Profile | None:
    """The profile that `LLMOPT_CPU` names; None for this machine as it is. Raises BadInput: an unknown
    profile, or one whose instructions this processor lacks."""
    name = os.environ.get(PROFILE_VARIABLE) or NATIVE
    if name == NATIVE:
        return None
    chosen = next((known for known in PROFILES if known.name == name), None)
    if chosen is None:
        names = ", ".join(known.name for known in PROFILES)
        raise BadInput(f"{PROFILE_VARIABLE}={name}: choose {NATIVE}, {names}")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BadInput(
            f"{PROFILE_VARIABLE}={name}: this is no x86 processor but {platform.machine()}; "
            f"choose {NATIVE}"
        )
    if missing := sorted(chosen.flags - machine_flags()):
        raise BadInput(f"{PROFILE_VARIABLE}={name}: this processor lacks {', '.join(missing)}")
    return chosen


def apply_profile() -> None:
    """Set the variables of the libraries for `LLMOPT_CPU`; call it before torch is imported.

    A wrong value is reported where a decision first needs it, as one line."""
    try:
        chosen = profile()
    except BadInput:
        return
    if chosen is None:
        return
    late = [name for name, value in chosen.libraries.items() if os.environ.get(name) != value]
    if late and "torch" in sys.modules:
        warnings.warn(
            f"{PROFILE_VARIABLE}={chosen.name} is incomplete: torch was imported before llmopt",
            stacklevel=2,
        )
    os.environ.update(chosen.libraries)


def arm_features() -> frozenset[str]:
    """Features of this processor that the C kernels have a path for, by Linux's names."""
    if sys.platform == "darwin":
        features = {name for name, feature in ARM_FEATURES.items() if _sysctl(feature)}
    else:
        features = ARM_FEATURES.keys() & _cpuinfo("Features").split()
    return frozenset({"asimd", *features})  # NEON is part of the architecture's base


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
    hundreds of sizes, which do not come again before they are dropped."""
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "32")


VARIABLE = "LLMOPT_NATIVE"


@dataclass(frozen=True, slots=True)
class InstructionPath:
    """An instruction set to compile the kernels for.

    Attributes:
        name: value of `LLMOPT_NATIVE` that chooses it.
        needs: flags that the processor must have, by their names in /proc/cpuinfo.
        options: compiler options.
        extras: optional flags, each with its compiler option or macro; the last `-march` counts.
    """

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]
    extras: tuple[tuple[str, str], ...] = ()

    def compiler_options(self, flags: frozenset[str]) -> tuple[str, ...]:
        return self.options + tuple(option for flag, option in self.extras if flag in flags)


_AVX2_OPTIONS = ("-mavx2", "-mfma", "-mf16c")
PATHS = (
    InstructionPath(
        "avx512vnni",
        _AVX2 | _AVX512 | {"avx512_vnni"},
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


def processor_flags() -> frozenset[str]:
    """The flags that may be used: this machine's, within the profile of `LLMOPT_CPU`. Raises BadInput: as
    `profile`."""
    chosen = profile()
    return machine_flags() if chosen is None else machine_flags() & chosen.flags


@lru_cache(maxsize=1)
def machine_flags() -> frozenset[str]:
    """Flags of an x86-64 as /proc/cpuinfo lists them, or features of an aarch64; else empty."""
    if platform.machine() in ("aarch64", "arm64"):
        return arm_features()
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    return frozenset(_cpuinfo("flags").split())


def cpu_model() -> str:
    """The model of the processor as the system names it, with the profile that it is used as."""
    chosen = profile()
    name = (
        _cpuinfo("model name", "Hardware", "cpu model")
        or platform.processor()
        or platform.machine()
    )
    return name if chosen is None else f"{name} used as {chosen.name}"


def _cpuinfo(*names: str) -> str:
    """The first value of one of the names in /proc/cpuinfo; empty where there is none."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(names))
    return next(values, "")


_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI")


def computes_in_bf16() -> bool:
    """Tell whether oneDNN computes in bfloat16 here, natively or by converting in registers.

    It does with AVX-512, AVX-NE-CONVERT or Arm's BF16, unless `ONEDNN_MAX_CPU_ISA` forbids them; torch for
    macOS has no oneDNN. Elsewhere torch emulates bfloat16, tens of times slower than float32."""
    if sys.platform == "darwin":
        return False
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BF16:
        return False
    flags = processor_flags()
    return flags >= _AVX512 or bool(flags & {"avx_ne_convert", "bf16"})


def multiplies_bf16() -> bool:
    """Tell whether there are instructions for bfloat16 products, faster than float32's."""
    return computes_in_bf16() and "avx512_bf16" in processor_flags()


def torch_capability() -> str:
    """The instruction level of torch's own operations, as torch names it; imports torch."""
    import torch

    return torch.backends.cpu.get_cpu_capability()


def choose_path() -> InstructionPath | str:
    """The instruction path to compile for, or the reason why there is none. Raises BadInput: `LLMOPT_NATIVE`
    names an unknown path, or one that this processor does not support."""
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

    What the user has set counts. A runtime reads its environment when it is loaded, with torch."""
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in os.environ:
        return "GOMP_SPINCOUNT" in os.environ
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    return True


def without_openmp_spins(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of another engine's process, which is measured as its user would start it."""
    bounded = {"GOMP_SPINCOUNT": OPENMP_SPINS}.items()
    return {name: value for name, value in environment.items() if (name, value) not in bounded}


apply_profile()
OPENMP_SPINS_ARE_BOUNDED = _bound_openmp_spins()
