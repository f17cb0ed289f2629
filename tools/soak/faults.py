"""Faults in the server of the soak, and a client that measures how soon it serves again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PROBE = {"prompt": "Once", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
PROBE_SECONDS = 0.25


@dataclass
class Recovery:
    """Faults, and the probes that were answered.

    Attributes:
        faults: times at which a fault was injected.
        served: begin and end of each probe that was answered.
        not_served: answers to the others, with their counts.
    """

    faults: list[float] = field(default_factory=list)
    served: list[tuple[float, float]] = field(default_factory=list)
    not_served: dict[str, int] = field(default_factory=dict)

    def seconds_to_serve(self) -> list[float]:
        """For each fault, how long until a probe that began after it was answered."""
        return [
            min((end - at for begin, end in self.served if begin >= at), default=float("inf"))
            for at in self.faults
        ]

    async def probe(self, session: aiohttp.ClientSession, url: str, ended: asyncio.Event) -> None:
        """Ask for two tokens, again and again."""
        while not ended.is_set():
            begin, answer = time.monotonic(), ""
            try:
                async with session.post(f"{url}/v1/completions", json=PROBE) as response:
                    found: dict[str, Any] = await response.json()
                    answer = f"{response.status} {found.get('error', {}).get('code')}"
                    if response.status == 200:
                        self.served.append((begin, time.monotonic()))
            except aiohttp.ClientError as error:
                answer = type(error).__name__
            if not answer.startswith("200"):
                self.not_served[answer] = self.not_served.get(answer, 0) + 1
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), PROBE_SECONDS)

    async def inject(self, pid: int, interval: float, seconds: float) -> None:
        """Let a step fail every `interval` seconds, for `seconds`; an interval of 0 is never."""
        if not interval:
            return
        end = time.monotonic() + seconds
        while time.monotonic() + interval < end:
            await asyncio.sleep(interval)
            self.faults.append(time.monotonic())
            os.kill(pid, signal.SIGUSR1)

    def checks(self, limit_seconds: float) -> dict[str, bool]:
        """Whether the server served soon after each fault; nothing without faults."""
        if not self.faults:
            return {}
        name = f"a probe was served within {limit_seconds:g} s of each fault"
        return {name: max(self.seconds_to_serve()) < limit_seconds}

    def record(self) -> dict[str, Any]:
        """For the soak's result."""
        waits = self.seconds_to_serve()
        return {
            "faults": len(self.faults),
            "seconds_to_serve": {
                "median": sorted(waits)[len(waits) // 2] if waits else None,
                "max": max(waits, default=None),
            },
            "probes_answered": len(self.served),
            "slowest_probe_seconds": max((end - begin for begin, end in self.served), default=None),
            "probes_not_answered": self.not_served,
        }
