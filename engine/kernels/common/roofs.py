"""What this CPU can do at most: bytes read a second, and 8-bit operations a second."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch

from .build import native

READ_BYTES = 2**27
ROUNDS = 500_000


class NoRoofs(RuntimeError):
    """There are no C kernels here to measure with; the message says why."""


class Roofs:
    """Bytes and 8-bit operations a second of the whole machine, a measurement for each round.

    Raises:
        NoRoofs: nothing to measure with.
    """

    def __init__(self, threads: int) -> None:
        found = native(Path(__file__).with_name("roofs.c"))
        if found.library is None:
            raise NoRoofs(f"no C kernels here: {found.reason}")
        self._library, self._threads = found.library, threads
        self._library.llmopt_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._library.llmopt_multiply.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self._library.llmopt_multiply.restype = ctypes.c_int64
        self._data = torch.ones(READ_BYTES, dtype=torch.uint8)
        self.bytes: list[float] = []
        self.operations: list[float] = []

    def measure(self) -> None:
        """A round of each."""
        begin = time.perf_counter()
        self._library.llmopt_read(self._data.data_ptr(), READ_BYTES, self._threads)
        middle = time.perf_counter()
        count = self._library.llmopt_multiply(ROUNDS, self._threads)
        self.bytes.append(READ_BYTES / (middle - begin))
        self.operations.append(count / (time.perf_counter() - middle))
