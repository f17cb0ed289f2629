"""Patch `time` and `socket`: calls stall at random, and `perf_counter` drifts against the other clocks.

The module imports little, because it also runs at the start of every Python subprocess of a test.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

SHORTEST_SECONDS, LONGEST_SECONDS = 0.005, 0.5

RARITY = {"read": 30, "sleep": 4, "receive": 12, "test": 4}
"""One call of a kind in this many stalls at first."""

FADE = 4
"""Calls that raise the rarity by one, so that a loop of a million reads stalls tens of times, not 30,000."""

WAVES = ((0.9, 11.0), (0.4333, 1.7))
"""Amplitude of the rate and period in seconds; the sum of the amplitudes is 4/3."""

_sleep, _perf_counter_ns = time.sleep, time.perf_counter_ns


class Jitter:
    """Stalls of the process, in an order that a seed and the name of a test determine."""

    def __init__(self) -> None:
        self.phases = [0.0 for _ in WAVES]
        self.drifts = False
        self._draw: random.Random | None = None
        self._num_calls = 0

    def drift(self, seed: int) -> None:
        """Let `perf_counter` drift from now on: alike in all processes of the seed, which compare its
        times."""
        draw = random.Random(seed)
        self.phases = [draw.uniform(0, 2 * math.pi) for _ in WAVES]
        self.drifts = True

    def begin(self, seed: int, name: str) -> None:
        """Draw the stalls from here on by `name`."""
        self._draw, self._num_calls = random.Random(f"{seed} {name}"), 0

    def end(self) -> None:
        """Stall no more."""
        self._draw = None

    def stall(self, kind: str) -> None:
        draw = self._draw
        if draw is None:
            return
        self._num_calls += 1
        if draw.random() * (RARITY[kind] + self._num_calls / FADE) < 1:
            # Most stalls are short: the median is 9 ms, the mean 50 ms.
            _sleep(SHORTEST_SECONDS * (LONGEST_SECONDS / SHORTEST_SECONDS) ** (draw.random() ** 3))

    def drifted(self, nanoseconds: int) -> float:
        """Seconds of a clock that runs 1/3 to 3 times as fast as the real one, and never backwards."""
        seconds = nanoseconds / 1e9
        if not self.drifts:
            return seconds
        total = 5 / 3 * seconds
        for (amplitude, period), phase in zip(WAVES, self.phases, strict=True):
            frequency = 2 * math.pi / period
            total += amplitude / frequency * math.sin(frequency * seconds + phase)
        return total


JITTER = Jitter()


def perf_counter() -> float:
    JITTER.stall("read")
    return JITTER.drifted(_perf_counter_ns())


def perf_counter_ns() -> int:
    return round(perf_counter() * 1e9)


def sleep(seconds: float, /) -> None:
    _sleep(seconds)
    JITTER.stall("sleep")


def stalling(kind: str, call: Callable[..., Any], /) -> Callable[..., Any]:
    def stalled(*arguments: Any) -> Any:
        JITTER.stall(kind)
        return call(*arguments)

    return stalled


def patch_time() -> None:
    """Replace the functions of `time`, before other modules import them by name."""
    time.perf_counter, time.perf_counter_ns, time.sleep = perf_counter, perf_counter_ns, sleep
    for name in ("monotonic", "monotonic_ns", "time", "time_ns", "process_time"):
        setattr(time, name, stalling("read", getattr(time, name)))


def patch_sockets() -> None:
    """Let reads of sockets stall, asyncio's too: its transports read by `socket.recv`."""
    import socket

    for name in ("recv", "recv_into"):
        setattr(socket.socket, name, stalling("receive", getattr(socket.socket, name)))


def patch_asyncio_sleep() -> None:
    import asyncio

    original = asyncio.sleep

    async def overshooting(delay: float, result: Any = None) -> Any:
        answer = await original(delay, result)
        if delay > 0:
            JITTER.stall("sleep")
        return answer

    asyncio.sleep = asyncio.tasks.sleep = overshooting  # type: ignore[assignment]
