"""The one way in which a step calls C kernels, so that its calls can be written down and made again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .build import native

Launch = tuple[Any, ctypes.Structure]
"""A C function and its only argument."""


class _LaunchCapture(threading.local):
    on_launch: Callable[[Launch], None] | None = None


_capture = _LaunchCapture()


def launch(function: Any, call: ctypes.Structure) -> int:
    """Call a C function, or while somebody listens only tell of it; 0 says that it succeeded.

    What `call` points at must outlive a recording of it.
    """
    if _capture.on_launch is not None:
        _capture.on_launch((function, call))
        return 0
    return function(ctypes.byref(call))


@contextmanager
def capturing_launches(on_launch: Callable[[Launch], None]) -> Iterator[None]:
    """Tell `on_launch` of every launch of this thread, instead of making it, while the block lasts."""
    before, _capture.on_launch = _capture.on_launch, on_launch
    try:
        yield
    finally:
        _capture.on_launch = before


class _Entry(ctypes.Structure):
    """`Entry` of `replay.c`."""

    _fields_ = [("function", ctypes.c_void_p), ("argument", ctypes.c_void_p)]


def replay_launches(launches: Sequence[Launch]) -> Callable[[], None]:
    """Something that makes these launches again, in one call."""
    library = native(Path(__file__).with_name("replay.c")).library
    assert library is not None, "what was launched was compiled, so this can be too"
    held = list(launches)
    entries = (_Entry * len(held))(
        *(
            (ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(call))
            for function, call in held
        )
    )

    def run() -> None:
        if library.llmopt_replay(entries, ctypes.c_int64(len(held))):
            raise MemoryError("no memory for the work of a kernel")

    return run
