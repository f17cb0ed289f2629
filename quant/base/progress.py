"""How long work reports itself, without knowing whether a terminal is watching."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A place to say how far the work is. The command line draws it; tests and libraries ignore it."""

    def start(self, description: str, total: int, unit: str) -> None:
        """Begin a new task of `total` units; ends the previous one."""
        ...

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""
        ...

    def status(self, text: str) -> None:
        """What the current task is like by now, shown beside how far it is."""
        ...

    def note(self, message: str) -> None:
        """Say one line to the person watching."""
        ...

    def finish(self) -> None:
        """The current task is over."""
        ...


class Silent:
    """A `Progress` that says nothing."""

    def start(self, description: str, total: int, unit: str) -> None:
        pass

    def advance(self, count: int = 1) -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def finish(self) -> None:
        pass
