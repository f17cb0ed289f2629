"""Devices: reasons why they do not support C kernels, Triton kernels or libraries, and limits of a GPU.

Triton is imported only where its kernels are used. Libraries (extra `cuda-kernels`) are installed packages,
or builds of the hub's `kernels`. A `refuses_...` function returns a reason, or None.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import torch

from ....base.build import Native
from ....base.errors import first_line

_log = logging.getLogger(__name__)
Result = TypeVar("Result")

CPU_DTYPES = (torch.bfloat16, torch.float32)
"""Activations of the C kernels."""
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LIBRARY_DTYPES = (torch.bfloat16, torch.float16)
VARIABLE = "LLMOPT_TRITON"
"""`off`: no Triton kernels. `interpret`: they also run on the CPU, in Triton's (slow) interpreter."""


class ActivationsQuery(Protocol):
    """A kernel query about activations of a dtype on a device type."""

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...


def serves_all(_: object) -> None:
    """Refuse no kernel query: the reference serves all."""


def refuses_cpu(device: str) -> str | None:
    return None if device == "cpu" else "it is a CPU kernel"


def refuses_native(query: ActivationsQuery, kernel: Callable[[], Native]) -> str | None:
    is_taken = query.dtype in CPU_DTYPES
    reason = None if is_taken else f"it takes bfloat16 and float32, not {query.dtype}"
    return refuses_cpu(query.device) or kernel().reason or reason


def refuses_triton(device: str) -> str | None:
    """Reason why Triton kernels do not support a device type."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted == "off":
        return f"{VARIABLE}=off"
    if device != "cuda" and not (device == "cpu" and wanted == "interpret"):
        return "it is a GPU kernel"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device == "cuda" and torch.cuda.is_available() and (reason := _launch_problem()) is not None:
        return reason
    if wanted == "interpret" and not interpret():
        return "Triton was imported before it was told to interpret: set TRITON_INTERPRET=1"
    return None


def refuses_rows(query: ActivationsQuery) -> str | None:
    is_taken = query.dtype in TRITON_DTYPES
    reason = None if is_taken else f"it takes bfloat16, float16 and float32, not {query.dtype}"
    return refuses_triton(query.device) or reason


@cache
def interpret() -> bool:
    """Switch Triton to its interpreter: the environment must say so before Triton is first imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from .triton_language import patch_interpreter

    return patch_interpreter()


COMPILE_SECONDS = 180.0
"""Time limit of a compilation, many times what any kernel takes: a compiler that hangs blocks the start."""


def within(seconds: float, what: str, call: Callable[[], Result]) -> Result:
    """Result of a call on a thread of its own, or its error; TimeoutError, and the thread is abandoned."""
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            ended.put((call(), None))
        except BaseException as problem:
            ended.put((None, problem))

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        result, problem = ended.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"{what} took more than {seconds:.0f} s") from None
    if problem is not None:
        raise problem
    return result


def limit_compilation() -> None:
    """Have Triton give up a kernel after `COMPILE_SECONDS`; before launches, which bind the compiler."""
    import triton.compiler as compiler

    compile_kernel: Any = compiler.compile
    if hasattr(compile_kernel, "__wrapped__"):
        return

    @wraps(compile_kernel)
    def limited(source: Any, *given: Any, **named: Any) -> Any:
        name = f"compiling {getattr(source, 'name', 'a kernel')}"
        return within(COMPILE_SECONDS, name, lambda: compile_kernel(source, *given, **named))

    compiler.compile = limited


@cache
def _launch_problem() -> str | None:
    """Reason why Triton, which compiles its driver at first use, cannot launch on this GPU; logged once."""
    try:
        from triton.runtime import driver

        limit_compilation()
        active: Any = driver.active
        active.utils  # noqa: B018
    except Exception as problem:
        # No C compiler, no headers of Python, a libcuda that it does not find.
        reason = f"Triton's driver does not load: {first_line(problem)}"
        _log.warning("kernels of torch serve the GPU, as %s", reason)
        return reason
    return None


def refuses_fp8(device: str) -> str | None:
    """Reason why a device type has no FP8 (e4m3 x e4m3) GEMM."""
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return f"a GPU of compute capability {capability[0]}.{capability[1]} has no FP8"
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """Module with kernels, or the reason why there is none."""

    module: Any = None
    reason: str | None = None


@cache
def hub_kernel(repository: str) -> Backend:
    """Kernels of a repository of the hub, built for this torch and CUDA: fetched once, then cached."""
    if find_spec("kernels") is None:
        return Backend(reason="needs the extra cuda-kernels")
    # Errors of the hub, its cache, a build that is missing, a library that does not load.
    return _loaded(repository, lambda: import_module("kernels").get_kernel(repository))


@cache
def package(name: str) -> Backend:
    if find_spec(name) is None:
        return Backend(reason=f"{name} is not installed")
    return _loaded(name, lambda: import_module(name))


def _loaded(name: str, load: Callable[[], Any]) -> Backend:
    try:
        return Backend(load())
    except Exception as problem:
        return Backend(reason=f"{name}: {type(problem).__name__}: {first_line(problem)}")


def refuses_device(
    device: str, majors: tuple[int, ...], dtype: torch.dtype | None = None
) -> str | None:
    """Reason why a library for these compute capabilities (16-bit activations, if `dtype`) cannot serve."""
    if device != "cuda" or not torch.cuda.is_available():
        return "it is a CUDA library"
    major, minor = torch.cuda.get_device_capability()
    if major not in majors:
        supported = ", ".join(f"{number}.x" for number in majors)
        return f"it has no build for compute capability {major}.{minor} ({supported})"
    if dtype is not None and dtype not in LIBRARY_DTYPES:
        return f"it takes bfloat16 and float16, not {dtype}"
    return None


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits of a GPU that launches depend on.

    Attributes:
        capability: compute capability, 90 for 9.0.
        has_dependent_launch: kernels may start before their predecessor has ended, in a captured graph too.
    """

    capability: int
    multiprocessors: int
    shared_bytes: int
    has_dependent_launch: bool = False


HOPPER = GpuLimits(90, 132, 227 * 1024)  # H100 SXM, H200
PRETENDED = HOPPER
"""Limits for launches without a GPU; a tool that compiles for other GPUs patches them."""


def gpu_limits(device: torch.device) -> GpuLimits:
    return _limits_of(device.index or 0) if device.type == "cuda" else PRETENDED


@cache
def _limits_of(index: int) -> GpuLimits:
    import triton

    driver: Any = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(index)
    major, minor = torch.cuda.get_device_capability(index)
    sizes = properties["multiprocessor_count"], properties["max_shared_mem"]
    takes_pdl = major >= 9 and os.environ.get(PDL_VARIABLE) != "off"
    return GpuLimits(10 * major + minor, *sizes, takes_pdl and _cuda_of_driver() >= DEPENDENT_CUDA)


PDL_VARIABLE = "LLMOPT_PDL"
"""`off`: no kernel starts by programmatic dependent launch."""
DEPENDENT_CUDA = 12030
"""CUDA 12.3, whose graphs keep programmatic dependencies."""


def _cuda_of_driver() -> int:
    """Newest CUDA that the driver serves, as 12030; 0 without a driver. torch 2.11 has no function for it."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def dependent_launch(x: torch.Tensor) -> dict[str, bool]:
    """Arguments for programmatic dependent launch of a kernel with 16-bit `x`, where the GPU has it."""
    if x.element_size() == 2 and gpu_limits(x.device).has_dependent_launch:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def or_unread(unread: torch.Tensor, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Pointers of a kernel; `unread` stands for a tensor that is missing, which the kernel does not read."""
    return [unread if tensor is None else tensor for tensor in tensors]


MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
"""The bits of the number whose unit in the last place is 1 (128; 1024), in both halves of a word."""

FEW_TOKENS = 64
"""Decode-sized batches: tokens per call up to which a GEMM is split-K."""
FEW_ROWS = 16
"""Rows of the least tile. Of 8, Hopper would take another instruction, whose sums differ in the last bits."""
DECODE_SLOTS = 4
"""Most programs per multiprocessor for a decode-sized batch; a prefill-sized one has one."""
RESERVED = 1024
"""Shared memory that the GPU keeps of each program."""
SPLIT_RUNS = 2
"""Fixed cost of a program, in runs: the first loads, and its part of the reduction."""


def decode_slots(device: torch.device, own_bytes: int) -> int:
    """Programs of a decode-sized batch, each with so much shared memory, that a GPU holds at once."""
    limits = gpu_limits(device)
    resident = (limits.shared_bytes + RESERVED) // (own_bytes + RESERVED)
    return limits.multiprocessors * max(1, min(DECODE_SLOTS, resident))


def split_runs(num_tiles: int, num_runs: int, slots: int) -> int:
    """Runs of a split: those with which the rounds of programs on the GPU's slots end first."""

    def cost(runs: int) -> int:
        programs = num_tiles * -(-num_runs // runs)
        return -(-programs // slots) * (runs + SPLIT_RUNS)

    return min(range(min(2, num_runs), num_runs + 1), key=lambda runs: (cost(runs), -runs))


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
