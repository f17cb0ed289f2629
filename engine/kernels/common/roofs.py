"""Roofline ceilings of this CPU: memory-read bandwidth, and peak 8-bit operations per second."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch

from ....quant.native.build import native

READ_BYTES = 2**27
ROUNDS = 500_000


class NoRoofs(RuntimeError):
    """There are no C kernels to measure with; the message gives the reason."""


class Roofs:
    """Roofline ceilings of the whole machine: bytes and 8-bit operations per second, one sample per round.

    Raises:
        NoRoofs: there are no C kernels to measure with.
    """

    def __init__(self, threads: int) -> None:
        kernels = native(Path(__file__).with_name("roofs.c"))
        if kernels.library is None:
            raise NoRoofs(f"no C kernels here: {kernels.reason}")
        self._library, self._threads = kernels.library, threads
        self._library.llmopt_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._library.llmopt_multiply.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self._library.llmopt_multiply.restype = ctypes.c_int64
        self._data = torch.ones(READ_BYTES, dtype=torch.uint8)
        self.bytes: list[float] = []
        self.operations: list[float] = []

    def measure(self) -> None:
        """Take one sample of each."""
        begin = time.perf_counter()
        self._library.llmopt_read(self._data.data_ptr(), READ_BYTES, self._threads)
        middle = time.perf_counter()
        count = self._library.llmopt_multiply(ROUNDS, self._threads)
        self.bytes.append(READ_BYTES / (middle - begin))
        self.operations.append(count / (time.perf_counter() - middle))
