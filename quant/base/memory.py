"""Peak resident memory of a run (Linux `VmHWM`), and control of glibc's heap."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # mallopt(3)
_OUTSIDE_BYTES, _TRIMMED_BYTES = 2**20, 2**17
_OUTSIDE_IN_PASSES, _KEPT_IN_PASSES = 16 * 2**20, 256 * 2**20
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak resident set size since construction, beyond what was resident then."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # Linux: resets the peak
        self._baseline = _field("VmRSS")
        if self._baseline is None:
            self._baseline = _ru_maxrss()

    @property
    def bytes(self) -> int:
        """Bytes, never negative; where the peak cannot be reset, the whole process's peak counts."""
        assert self._baseline is not None
        peak = _field("VmHWM")
        return max(0, (_ru_maxrss() if peak is None else peak) - self._baseline)


def give_back() -> None:
    """`malloc_trim`: return freed memory to the operating system, so that layers' peaks do not add up.

    The C library keeps freed blocks in heaps whose holes fit no tensor of another size. From the first
    call on, larger tensors are mmapped outside its heaps. Without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = _allocate(_OUTSIDE_BYTES, _TRIMMED_BYTES)
        library.malloc_trim(0)


@contextlib.contextmanager
def temporaries_kept() -> Iterator[None]:
    """Let the heap keep freed blocks while many short-lived tensors are allocated.

    Page faults cost more time than the arithmetic on the tensors. Afterwards the heap is trimmed; a small
    object that outlives the tensors would keep it from shrinking.
    """
    with contextlib.suppress(OSError, AttributeError):
        _allocate(_OUTSIDE_IN_PASSES, _KEPT_IN_PASSES)
    try:
        yield
    finally:
        give_back()


def _allocate(outside_bytes: int, kept_bytes: int) -> ctypes.CDLL:
    """`mallopt`: mmap blocks of at least `outside_bytes`; keep `kept_bytes` of freed memory in the heap."""
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, outside_bytes)
    library.mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    return library


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith(name + ":")), None)
    return None if line is None else int(line.split()[1]) * 1024


def _ru_maxrss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
