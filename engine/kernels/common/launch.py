"""Launches of C kernels: the single entry point, so that CPU graphs can capture and replay them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....quant.native.build import native

Launch = tuple[Any, ctypes.Structure]
"""A C function and its only argument."""


class _LaunchCapture(threading.local):
    on_launch: Callable[[Launch], None] | None = None
    on_call: Callable[[Callable[[], object]], None] | None = None


_capture = _LaunchCapture()


def launch(function: Any, call: ctypes.Structure) -> int:
    """Call a C function, or under `capturing_launches` only report it; 0 is success.

    What `call` points at must outlive a capture of it.
    """
    if _capture.on_launch is not None:
        _capture.on_launch((function, call))
        return 0
    return function(ctypes.byref(call))


def call_or_capture(call: Callable[[], object]) -> None:
    """Make a call that is neither a launch nor an operation of torch's, such as a collective; under
    `capturing_launches` only report it."""
    if _capture.on_call is not None:
        _capture.on_call(call)
    else:
        call()


@contextmanager
def capturing_launches(
    on_launch: Callable[[Launch], None], on_call: Callable[[Callable[[], object]], None]
) -> Iterator[None]:
    """Within the block, report every launch of this thread to `on_launch` instead of running it, and other
    calls to `on_call`."""
    before = _capture.on_launch, _capture.on_call
    _capture.on_launch, _capture.on_call = on_launch, on_call
    try:
        yield
    finally:
        _capture.on_launch, _capture.on_call = before


class _Entry(ctypes.Structure):
    """`Entry` of `replay.c`."""

    _fields_ = [("function", ctypes.c_void_p), ("argument", ctypes.c_void_p)]


def replay_launches(launches: Sequence[Launch]) -> Callable[[], None]:
    """A function that replays these launches in one C call."""
    library = native(Path(__file__).with_name("replay.c")).library
    assert library is not None, "captured launches need the same compiler as replay.c"
    held = list(launches)
    entries = (_Entry * len(held))(
        *(
            (ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(call))
            for function, call in held
        )
    )

    replay = library.llmopt_replay

    def run() -> None:
        if replay(entries, ctypes.c_int64(len(held))):
            raise MemoryError("no memory for a kernel's workspace")

    return run
