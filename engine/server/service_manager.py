"""systemd's notification protocol (`sd_notify`): readiness, stopping, and the watchdog.

Datagrams to the socket that `NOTIFY_SOCKET` names; nothing is sent where there is none. The watchdog is fed
while no step hangs, so that systemd restarts a server whose engine does. Source: sd_notify(3),
sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import os
import socket

from .loop.loop import EngineLoop


class ServiceManager:
    """The service manager that started this process, if any."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the null byte of an abstract address.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @property
    def watchdog_seconds(self) -> float | None:
        """Seconds within which the watchdog must be fed; None without one for this process."""
        if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        return int(microseconds) / 1e6 if microseconds.isdecimal() else None

    def notify(self, state: str) -> None:
        """Send a state such as `READY=1`. A manager that does not listen is no reason to fail."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(state.encode(), self._address)
            except OSError:
                return

    async def keep_alive(self, loop: EngineLoop) -> None:
        """Feed the watchdog, twice within its time, for as long as the engine takes its steps."""
        seconds = self.watchdog_seconds
        while seconds:
            if loop.unavailable is None and loop.stalled_seconds is None:
                self.notify("WATCHDOG=1")
            await asyncio.sleep(seconds / 2)
