"""Device and memory of a quantization.

A layer is run and solved on a device; what is between layers stays on the host. The heap of glibc is kept
from growing with every layer.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.hooks import RemovableHandle

from ...base.errors import BadInput, first_line
from ...base.memory import peak_memory_bytes, resident_bytes, restart_peak_memory
from ...base.option import check_device

HOST = torch.device("cpu")
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # mallopt(3)
_OUTSIDE_BYTES, _TRIMMED_BYTES = 2**20, 2**17
_OUTSIDE_IN_PASSES, _KEPT_IN_PASSES = 16 * 2**20, 256 * 2**20
_OWN_PAGES_BYTES = 2**18
LEAST_CAPABILITY = (8, 0)
"""Older GPUs have no bfloat16, and Triton compiles for none of them."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def device_of(name: str) -> torch.device:
    """The device that `--device` names: `cpu`, `cuda` or `cuda:1`. BadInput: it is not here."""
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda":
        problem = cuda_problem(device.index or 0)
        if problem is not None:
            raise BadInput(f"--device {name}: {problem}: take cpu")
    return device


def cuda_problem(index: int = 0) -> str | None:
    """Why this process cannot compute on a CUDA device (driver, age, in use, no kernels); None: it can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        why = "it is built without CUDA" if torch.version.cuda is None else ""
        why = str(caught[0].message).split(". ")[0].splitlines()[0] if caught else why
        return f"this torch ({torch.__version__}) sees no CUDA device{why and f': {why}'}"
    if index >= count:
        return f"there are {count} CUDA devices, cuda:0 to cuda:{count - 1}"
    try:
        capability = torch.cuda.get_device_capability(index)
        if capability < LEAST_CAPABILITY:
            name, have = torch.cuda.get_device_name(index), "{}.{}".format(*capability)
            least = "{}.{}".format(*LEAST_CAPABILITY)
            return f"{name} has compute capability {have}, and {least} is needed"
        torch.zeros(1, device=f"cuda:{index}")
    except torch.OutOfMemoryError:
        return "its memory is full"
    except RuntimeError as problem:
        return f"cuda:{index} does not compute: {first_line(problem)}"
    return None


def has_nvidia_gpu() -> bool:
    """True if Linux, or else torch, sees a GPU of NVIDIA's, whatever of driver and libraries is missing."""
    for vendor in PCI_DEVICES.glob("*/vendor"):
        with contextlib.suppress(OSError):
            kind = vendor.with_name("class").read_text()
            if vendor.read_text().strip() == _NVIDIA and kind.startswith(_DISPLAY):
                return True
    return torch.cuda.is_available()


@contextlib.contextmanager
def hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_VALUES_ON_DEVICE = 2**24
"""Temporaries of as many floats take some GiB where several candidates are tried at once."""


def rows_at_once(device: torch.device, values: int, per_row: int) -> int:
    """Rows of `per_row` values at once: on the host `values` in all, for the cache, on devices more."""
    return max(1, (values if device == HOST else max(values, _VALUES_ON_DEVICE)) // per_row)


class PeakMemory:
    """Peak resident set size since construction, beyond what was resident then."""

    def __init__(self) -> None:
        restart_peak_memory()
        self._baseline = resident_bytes()

    @property
    def bytes(self) -> int:
        return max(0, peak_memory_bytes() - self._baseline)


def give_back() -> None:
    """`malloc_trim`: return freed memory, so that layers' peaks do not add up; larger tensors are mmapped."""
    with contextlib.suppress(OSError, AttributeError):
        library = _allocate(_OUTSIDE_BYTES, _TRIMMED_BYTES)
        library.malloc_trim(0)


@contextlib.contextmanager
def temporaries_kept() -> Iterator[None]:
    """Let the heap keep freed blocks while many short-lived tensors are allocated; trim it afterwards."""
    with contextlib.suppress(OSError, AttributeError):
        _allocate(_OUTSIDE_IN_PASSES, _KEPT_IN_PASSES)
    try:
        yield
    finally:
        give_back()


def lasting_zeros(*shape: int, device: torch.device | None = None) -> torch.Tensor:
    """Float32 zeros that outlive the passes, on the host in pages of their own, not in the heap's holes."""
    size = math.prod(shape) * torch.float32.itemsize
    if size < _OWN_PAGES_BYTES or (device or HOST) != HOST:
        return torch.zeros(shape, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)


def _allocate(outside_bytes: int, kept_bytes: int) -> ctypes.CDLL:
    """`mallopt`: mmap blocks of at least `outside_bytes`; keep `kept_bytes` of freed memory in the heap."""
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, outside_bytes)
    library.mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    return library
