"""Measurements of this CPU with `roofs.c`: roofline ceilings, and the number of threads of a step.

With other busy processes, or with little memory bandwidth for its cores, a machine can be faster with fewer
threads. Synthetic decode steps find out: many short parallel calls that read memory, as layers do.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ....base.build import native

READ_BYTES = 2**27
ROUNDS = 500_000


class NoRoofs(RuntimeError):
    """There are no C kernels to measure with; the message gives the reason."""


class CpuRoofs:
    """Roofline ceilings of the whole machine: bytes and 8-bit operations per second, one sample per round.
    Operations are those of AMX where the system gives its tiles, else of dot products. Raises NoRoofs."""

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
        begin = time.perf_counter()
        self._library.llmopt_read(self._data.data_ptr(), READ_BYTES, self._threads)
        middle = time.perf_counter()
        count = self._library.llmopt_multiply(ROUNDS, self._threads)
        self.bytes.append(READ_BYTES / (middle - begin))
        self.operations.append(count / (time.perf_counter() - middle))


STEP_BYTES, STEP_CALLS, SAMPLES = 2**25, 128, 5
MOST_SECONDS = 0.5
"""No further samples after this time: with busy processes a step may take seconds."""
CLEARLY_FASTER = 1.1
"""Least speedup for which fewer threads are taken: prefill and later steps use every core that is free."""


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """Number of threads, by the median seconds of a synthetic step; `reason` says why there is none."""

    num_threads: int
    seconds: tuple[tuple[int, float], ...] = ()
    reason: str | None = None


@lru_cache
def choose_threads(most: int) -> ThreadChoice:
    """Fastest of `most` threads and three, two and one quarters of them; `most` unless clearly slower."""
    if most == 1:
        return ThreadChoice(1, reason="one core")
    library = native(Path(__file__).with_name("roofs.c")).library
    if library is None:
        return ThreadChoice(most, reason="no C kernels to measure with")
    data = torch.ones(STEP_BYTES, dtype=torch.uint8)
    library.llmopt_read_in_calls.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]

    def step(num_threads: int) -> float:
        begin = time.perf_counter()
        library.llmopt_read_in_calls(data.data_ptr(), STEP_BYTES, STEP_CALLS, num_threads)
        return time.perf_counter() - begin

    return choose_by(step, most)


def choose_by(step: Callable[[int], float], most: int) -> ThreadChoice:
    """Choice by `step`, which runs a step on some threads and returns its seconds."""
    counts = sorted({most, *(max(1, most * quarters // 4) for quarters in (1, 2, 3))}, reverse=True)
    samples: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(SAMPLES):
        for count in counts:
            samples[count].append(step(count))
        if sum(map(sum, samples.values())) > MOST_SECONDS:
            break
    seconds = {count: statistics.median(times) for count, times in samples.items()}
    fastest = min(counts, key=lambda count: seconds[count])
    chosen = fastest if seconds[fastest] * CLEARLY_FASTER < seconds[most] else most
    return ThreadChoice(chosen, tuple(seconds.items()))
