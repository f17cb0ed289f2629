"""A delay injected into the steps of an engine, for proving that a comparison notices a slowdown, also one in
what is a small part of the whole."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """An engine's hook: makes one of its phases, or whole steps, last `factor` times as long."""

    phase: Literal["sample", "step"]
    factor: float

    def __call__(self, phase: str, seconds: float) -> None:
        if phase != self.phase:
            return
        # Spinning, not sleeping: a sleeping core wakes up slow and would slow what comes next too.
        until = time.perf_counter() + seconds * (self.factor - 1)
        while time.perf_counter() < until:
            pass


def injected_delay(factor: float, where: Literal["step", "sampler"]) -> InjectedDelay | None:
    """The delay that the options `slowdown` and `slowdown_where` ask for; none for a factor of 1."""
    if factor == 1.0:
        return None
    return InjectedDelay("sample" if where == "sampler" else "step", factor)
