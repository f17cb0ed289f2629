"""Delay injection into engine steps, to test that a comparison detects a slowdown, also of a small phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


def spin(seconds: float) -> None:
    """Busy-wait: costs CPU time, and leaves the core awake for the following phase."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """Engine phase hook: stretches one phase, or whole steps, by `factor`.

    Attributes:
        wait: passes the added seconds: `spin`, or `time.sleep` for a delay that CPU time does not see.
    """

    phase: Literal["sample", "step"]
    factor: float
    wait: Callable[[float], None] = spin

    def __call__(self, phase: str, seconds: float) -> None:
        if phase == self.phase:
            self.wait(seconds * (self.factor - 1))


def injected_delay(factor: float, where: Literal["step", "sampler"]) -> InjectedDelay | None:
    """The hook for the options `slowdown` and `slowdown_where`; None for a factor of 1."""
    if factor == 1.0:
        return None
    return InjectedDelay("sample" if where == "sampler" else "step", factor)
