"""The pretended card: its facts, the current device of each thread, its memory, and the log of what was done."""

from __future__ import annotations

import collections
import math
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).parents[3]
LAYERS = ("base", "engine", "quant", "bench", "tools")
"""The folders whose lines are named as the place of a fault."""

Kind = Literal[
    "kernel", "triton", "copy", "replay", "sync", "pageable copy", "wrong device", "stale", "host"
]
FAULTS: tuple[Kind, ...] = ("sync", "pageable copy", "wrong device", "stale")
"""What no step may do; loading may, where nothing is captured."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that was done: in which phase, whether in a capture, and by which lines, innermost first."""

    phase: str
    captured: bool
    kind: Kind
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}{' in a capture' if self.captured else ''}: {self.what} at {self.where}"


class Allocation:
    """Memory of a storage on a device; counted until it is dropped."""

    __slots__ = ("__weakref__", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class _Thread(threading.local):
    device = 0


@dataclass
class Card:
    """One or several equal cards.

    Attributes:
        shared_bytes: shared memory of a program; 0: Hopper's.
        log: what was done, in order.
        compiles: launches compile what a GPU of this capability would run, into Triton's cache.
        computed: elements of the largest tensor of which operations are computed; of larger ones results are zero.
        host_bytes: a computation of the host whose result is larger is told.
        captures: graphs that were captured.
        waits: how often the host waited for an event, which is no fault.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 80 << 30
    shared_bytes: int = 227 << 10
    multiprocessors: int = 132
    count: int = 1
    compiles: bool = False
    computed: float = math.inf
    host_bytes: float = math.inf
    log: list[Entry] = field(default_factory=list)
    waits: int = 0
    captures: int = 0
    phase: str = "load"
    capturing: bool = False
    held: collections.Counter[int] = field(default_factory=collections.Counter)
    peak: collections.Counter[int] = field(default_factory=collections.Counter)
    thread: _Thread = field(default_factory=_Thread)

    @property
    def current(self) -> int:
        """The current device of this thread; as in CUDA, a thread begins with the first."""
        return self.thread.device

    def add(self, kind: Kind, what: str) -> None:
        self.log.append(Entry(self.phase, self.capturing, kind, what, _where()))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def allocate(self, device: int, num_bytes: int) -> Allocation:
        """Count the bytes of a new storage.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        if self.held[device] + num_bytes > self.memory_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {num_bytes} bytes on cuda:{device}")
        self.held[device] += num_bytes
        self.peak[device] = max(self.peak[device], self.held[device])
        allocation = Allocation(num_bytes)
        weakref.finalize(allocation, self._free, device, num_bytes).atexit = False
        return allocation

    def refuse_in_capture(self, what: str) -> None:
        """As CUDA does with what no stream that is captured may do.

        Raises:
            RuntimeError: a stream is being captured.
        """
        if self.capturing:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {what}"
            )

    def faults(self, *, phases: Sequence[str] = ()) -> list[str]:
        """What may not happen in a step: entries of these phases (all but loading), and of every capture."""
        return [
            str(entry)
            for entry in self.log
            if entry.kind in FAULTS
            and (
                entry.captured
                or entry.kind in ("wrong device", "stale")
                or (entry.phase in phases if phases else entry.phase != "load")
            )
        ]

    def launches(self, phase: str, *, captured: bool = False) -> collections.Counter[str]:
        """Kernels that were launched in a phase, by name."""
        return collections.Counter(
            entry.what
            for entry in self.log
            if entry.kind in ("kernel", "triton")
            and entry.phase == phase
            and entry.captured == captured
        )

    def _free(self, device: int, num_bytes: int) -> None:
        self.held[device] -= num_bytes


def _where() -> str:
    """The innermost lines of the project on the stack."""
    lines = []
    for frame, number in traceback.walk_stack(None):
        parts = Path(frame.f_code.co_filename).parts
        package = parts[:-1].index("llmopt") + 1 if "llmopt" in parts[:-1] else len(ROOT.parts)
        if parts[package : package + 1] and parts[package] in LAYERS:
            lines.append(f"{'/'.join(parts[package:])}:{number}")
            if len(lines) == 3:
                break
    return " < ".join(lines)
