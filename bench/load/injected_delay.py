"""Delay injection into engine steps, to test that a comparison detects a slowdown, also of a small phase."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """Engine phase hook: stretches one phase, or whole steps, by `factor`."""

    phase: Literal["sample", "step"]
    factor: float

    def __call__(self, phase: str, seconds: float) -> None:
        if phase != self.phase:
            return
        # Busy-wait: a sleeping core wakes up slowly and would slow the following phase too.
        until = time.perf_counter() + seconds * (self.factor - 1)
        while time.perf_counter() < until:
            pass


def injected_delay(factor: float, where: Literal["step", "sampler"]) -> InjectedDelay | None:
    """The hook for the options `slowdown` and `slowdown_where`; None for a factor of 1."""
    if factor == 1.0:
        return None
    return InjectedDelay("sample" if where == "sampler" else "step", factor)
