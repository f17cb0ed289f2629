"""Progress reporting: the protocol, and the silent implementation."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Progress sink. The command line draws a bar; tests and libraries use `Silent`."""

    def start(self, description: str, total: int, unit: str) -> None:
        """Begin a new task of `total` units; ends the previous one."""
        ...

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""
        ...

    def status(self, text: str) -> None:
        """Status text of the current task, shown beside the bar."""
        ...

    def note(self, message: str) -> None:
        """Show one line to the user."""
        ...

    def finish(self) -> None:
        """The current task is over."""
        ...


class Silent:
    """A no-op `Progress`."""

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
