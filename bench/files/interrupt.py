"""Deferred SIGINT while a result is assembled, so that a Ctrl-C does not lose the measurement."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ignore the first Ctrl-C; a second one interrupts as usual.

    Only the main thread receives signals, so in other threads this does nothing.
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
