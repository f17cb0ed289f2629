"""How much memory a run takes: what the operating system says, from a point in time on."""

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
    """The most resident memory since this was made, beyond what was resident then."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # Linux: the peak starts anew
        self._baseline = _field("VmRSS")
        if self._baseline is None:
            self._baseline = _ru_maxrss()

    @property
    def bytes(self) -> int:
        """Bytes, never negative; where the peak cannot be set back, that of the whole process counts."""
        assert self._baseline is not None
        peak = _field("VmHWM")
        return max(0, (_ru_maxrss() if peak is None else peak) - self._baseline)


def give_back() -> None:
    """Return what was freed to the operating system, so that one layer's leavings do not add to the next's.

    The C library keeps freed blocks in heaps whose holes fit no tensor of another size. From the first
    call on, tensors of some size lie outside its heaps. Elsewhere than with glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = _allocate(_OUTSIDE_BYTES, _TRIMMED_BYTES)
        library.malloc_trim(0)


@contextlib.contextmanager
def temporaries_kept() -> Iterator[None]:
    """Let the heap keep what is freed while many tensors come and go that none outlives.

    Memory that is new to the process costs more time than the arithmetic on it. Afterwards all is given back;
    a small object that stays among them would keep the heap from shrinking.
    """
    with contextlib.suppress(OSError, AttributeError):
        _allocate(_OUTSIDE_IN_PASSES, _KEPT_IN_PASSES)
    try:
        yield
    finally:
        give_back()


def _allocate(outside_bytes: int, kept_bytes: int) -> ctypes.CDLL:
    """Blocks of at least so many bytes lie outside the heaps, which keep so many freed bytes at their end."""
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
