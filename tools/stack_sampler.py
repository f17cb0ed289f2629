"""Statistical profiler: a timer interrupts the main thread, and its stack says what it was doing."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

INTERVAL_SECONDS = 5e-4


class StackSampler:
    """Counts timer ticks while it is entered, by the innermost of the named functions on the stack.

    Python runs a signal's handler once the C function that it interrupted has returned. The ticks that passed
    meanwhile are that function's, so that long calls of native code count in full.

    Args:
        parts: what a function's ticks count as, those that it spends in functions not named here included.
        within: ticks outside of this function do not count; those in it and in no part have the name "rest".
    """

    def __init__(self, parts: Mapping[Callable[..., Any], str], within: Callable[..., Any]) -> None:
        self.ticks: Counter[str] = Counter()
        self._parts = {code_of(function): part for function, part in parts.items()}
        self._within = code_of(within)
        self._begun, self._last = 0.0, 0
        self._before: tuple[Any, tuple[float, float]] | None = None

    def __enter__(self) -> StackSampler:
        handler = signal.signal(signal.SIGALRM, self._tick)
        self._begun, self._last = time.perf_counter(), 0
        # Others may use the same timer (a test's timeout): it is restored afterwards.
        timer = signal.setitimer(signal.ITIMER_REAL, INTERVAL_SECONDS, INTERVAL_SECONDS)
        self._before = handler, timer
        return self

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        handler, timer = self._before
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)

    def shares(self) -> dict[str, float]:
        """Of the ticks that counted, those of each part."""
        total = self.ticks.total()
        return {part: count / total for part, count in self.ticks.items()}

    def _tick(self, _signal: int, frame: FrameType | None) -> None:
        number = int((time.perf_counter() - self._begun) / INTERVAL_SECONDS)
        passed, self._last = number - self._last, number
        part: str | None = None
        while frame is not None:
            if part is None:
                part = self._parts.get(frame.f_code)
            if frame.f_code is self._within:
                self.ticks[part or "rest"] += passed
                return
            frame = frame.f_back


def code_of(function: Callable[..., Any]) -> CodeType:
    """The code that a function's frames run, without its decorators."""
    return unwrap(function).__code__
