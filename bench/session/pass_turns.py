"""Passes of several processes in turns: each waits before every pass until it is its turn.

Neighbouring passes share the mood of the machine (another virtual machine on the same core makes everything
half as slow again for seconds), so that the change between two processes is far steadier over passes that
alternate than over one process after the other (docs/measuring.md has both deviations). The processes are
still fresh starts.

The environment variable LLMOPT_PASS_TURNS of a process holds `read,write,pair`: two open file descriptors
and the shared id of the pair. The process writes a byte when it is ready for a pass (and, behind its last
pass, for scoring), and goes on when it has read one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from ...quant.base.errors import BadInput

VARIABLE = "LLMOPT_PASS_TURNS"


@dataclass(frozen=True, slots=True)
class PassTurns:
    """The process's side of taking turns; without descriptors it never waits.

    Attributes:
        pair: shared id of the processes that take turns; None without any.
    """

    read: int | None = None
    write: int | None = None
    pair: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> PassTurns:
        """Read LLMOPT_PASS_TURNS.

        Raises:
            BadInput: it is malformed.
        """
        words = environment.get(VARIABLE)
        if not words:
            return cls()
        try:
            read, write, pair = words.split(",")
            return cls(int(read), int(write), pair)
        except ValueError as error:
            raise BadInput(f"{VARIABLE}={words}: it is read,write,pair") from error

    def wait(self) -> None:
        """Say that this process is ready, and wait for its turn; go on alone if nobody gives turns."""
        if self.read is None or self.write is None:
            return
        try:
            os.write(self.write, b"r")
            os.read(self.read, 1)
        except OSError:
            return


@dataclass(slots=True)
class TurnPipe:
    """The other side: gives one process its turns. `environment` and `descriptors` are for its start.

    Use: start the process with both, then call `started`; `ready` once, then `give` for every turn.
    """

    pair: str
    _pipes: tuple[tuple[int, int], tuple[int, int]] = field(
        default_factory=lambda: (os.pipe(), os.pipe())
    )
    is_over: bool = False

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors that the process inherits (`pass_fds` of subprocess)."""
        (read, _), (_, write) = self._pipes
        return read, write

    @property
    def environment(self) -> dict[str, str]:
        read, write = self.descriptors
        return {VARIABLE: f"{read},{write},{self.pair}"}

    def started(self) -> None:
        """Close the ends that the process has, so that its end is seen."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def ready(self) -> bool:
        """Wait until the process is ready; False once it has ended, or if it takes no turns."""
        if not self.is_over and not os.read(self._pipes[1][0], 1):
            self.close()
        return not self.is_over

    def give(self) -> bool:
        """One turn, to its end; False once the process has ended."""
        if self.is_over:
            return False
        try:
            os.write(self._pipes[0][1], b"g")
        except BrokenPipeError:
            self.close()
            return False
        return self.ready()

    def close(self) -> None:
        """Let the process go on alone."""
        if not self.is_over:
            os.close(self._pipes[0][1])
            os.close(self._pipes[1][0])
        self.is_over = True


def give_turns(turns: Sequence[TurnPipe]) -> None:
    """Give turns there and back (ABBA) until every process has ended. All are ready."""
    for turn in order(turns):
        turn.give()
        if all(one.is_over for one in turns):
            return


def order(turns: Sequence[TurnPipe]) -> Iterator[TurnPipe]:
    """A B B A A B B A …"""
    return cycle([*turns, *reversed(turns)])
