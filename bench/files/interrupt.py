"""Ctrl-C while a result is being put together: a matter of seconds that must not cost the measurement."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let the first Ctrl-C pass by; a second one interrupts as ever.

    Only the main thread receives signals, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
