"""Progress reporting: the protocol, and the silent implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

SHARE = "%"
"""The unit of a task whose total is its share that is done, in any parts."""


class Progress(Protocol):
    """Progress sink. The command line draws a bar; tests and libraries use `Silent`."""

    def start(self, description: str, total: int, unit: str) -> None:
        """Begin a new task of `total` units, 0 where they cannot be counted; ends the previous one."""

    def advance(self, count: float = 1) -> None:
        """`count` more units are done, or a part of one."""

    def status(self, text: str) -> None:
        """Status text of the current task, shown beside the bar."""

    def note(self, message: str) -> None:
        """Show one line to the user."""

    def finish(self) -> None:
        """The current task is over."""


class Silent(Progress):
    """A `Progress` that shows nothing: it has the protocol's methods, which do nothing."""


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """How far a task is: `done` of `total` units, with the part of one that is begun, and a status text."""

    description: str
    done: float
    total: int
    unit: str
    status: str = ""


class ProgressCallback(Silent):
    """A `Progress` that calls a function with each update. Notes are dropped: results hold them."""

    def __init__(self, call: Callable[[ProgressUpdate], None]) -> None:
        self._call = call
        self._now = ProgressUpdate("", 0, 0, "")
        self._done = 0.0

    def start(self, description: str, total: int, unit: str) -> None:
        self._done = 0.0
        self._tell(ProgressUpdate(description, 0, total, unit))

    def advance(self, count: float = 1) -> None:
        self._done += count
        done = round(self._done, 6)  # parts add up to whole units
        self._tell(replace(self._now, done=int(done) if done.is_integer() else done))

    def status(self, text: str) -> None:
        self._tell(replace(self._now, status=text))

    def _tell(self, update: ProgressUpdate) -> None:
        self._now = update
        self._call(update)


def as_progress(given: Progress | Callable[[ProgressUpdate], None] | None) -> Progress:
    """The sink that a caller of the Python API means: one, a function for updates, or none."""
    if given is None:
        return Silent()
    return ProgressCallback(given) if callable(given) else given


class SubRun:
    """The progress of a part of a command: each task begins with its purpose. Of the notes, only those that
    begin with one of `notes` are shown."""

    def __init__(
        self, inner: Progress, purpose: Callable[[], str], notes: tuple[str, ...] = ()
    ) -> None:
        self._inner, self._purpose, self._notes = inner, purpose, notes
        self.advance, self.status, self.finish = inner.advance, inner.status, inner.finish

    def start(self, description: str, total: int, unit: str) -> None:
        self._inner.start(f"{self._purpose()}, {description}", total, unit)

    def note(self, message: str) -> None:
        if message.startswith(self._notes):
            self._inner.note(message)


def in_words(seconds: float) -> str:
    """A time as people say it: `40 s`, `25 min`, `17 h`, `4 days`."""
    for limit, size, unit in ((100, 1, "s"), (100 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
