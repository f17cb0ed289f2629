"""Instructions retired by a set of threads, counted by `perf_event_open`, where the kernel allows it.

Source: perf_event_open(2). Only user space is counted, which `perf_event_paranoid` up to 2 allows.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

SYSCALLS = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _INSTRUCTIONS = 0, 1
_ATTR_BYTES = 120
# Bits of perf_event_attr: threads that start later are counted too; kernel and hypervisor are not.
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8


class InstructionCounter:
    """Counts from its creation to `stop`. A context is not needed: `stop` closes the counters.

    Args:
        threads: kernel thread ids; threads that they start are counted with them.

    Raises:
        OSError: the kernel refuses, or the machine has no counter; the message says which.
    """

    def __init__(self, threads: Iterable[int]) -> None:
        self._files: list[int] = []
        try:
            for thread in threads:
                self._files.append(_open_counter(thread))
        except OSError:
            self._close()
            raise

    def stop(self) -> int:
        """The instructions retired since the creation."""
        try:
            return sum(struct.unpack("Q", os.read(file, 8))[0] for file in self._files)
        finally:
            self._close()

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def why_not_counted() -> str | None:
    """Why this machine cannot count the instructions of this process; None where it can."""
    try:
        InstructionCounter([0]).stop()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _open_counter(thread: int) -> int:
    number = SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise OSError(f"perf_event_open is not known on {platform.system()} {platform.machine()}")
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HV
    head = struct.pack("IIQQQQQ", _HARDWARE, _ATTR_BYTES, _INSTRUCTIONS, 0, 0, 0, flags)
    attributes = ctypes.create_string_buffer(head, _ATTR_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.syscall(number, attributes, thread, -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC))
    if file < 0:
        code = ctypes.get_errno()
        words = "this machine has no counter" if code in (2, 19, 95) else os.strerror(code)
        raise OSError(code, f"perf_event_open: {words}")
    return file
