"""`llmopt`, with faults on demand: the server of the soak.

SIGUSR1 makes the engine's next step fail. Each fault is in another part of a step than the one before: while
it is scheduled, before and after it is computed, before its tokens are taken, and while they become text.
Whenever the engine falls idle the scheduler's state is checked, so that a leaked block or slot ends the
process with an error. Send buffers are small, so that a client that does not read is noticed soon.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

from llmopt.cli.main import main
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.model_runner import ModelRunner
from llmopt.engine.execution.output_processor import OutputProcessor
from llmopt.engine.scheduling.outputs import RequestOutput
from llmopt.engine.scheduling.scheduler import Scheduler
from uvicorn.protocols.http.h11_impl import H11Protocol


class Faults:
    """Raises in the next step, each time in the next of the parts of a step."""

    def __init__(self) -> None:
        self._num_armed = 0
        self._parts: list[str] = []

    def arm(self, *_: object) -> None:
        """Let one more step fail."""
        self._num_armed += 1

    def add(self, owner: type, name: str, *, after: bool = False) -> None:
        """Let `owner.name` fail before it does anything, or after all."""
        part = f"{owner.__name__}.{name}" + (", after" if after else "")
        self._parts.append(part)
        method: Callable[..., Any] = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not after:
                self._raise_at(part)
            result = method(*arguments, **named)
            if after:
                self._raise_at(part)
            return result

        setattr(owner, name, wrapped)

    def begin(self) -> None:
        """All parts are there."""
        self._order = cycle(self._parts)
        self._next = next(self._order)

    def _raise_at(self, part: str) -> None:
        if self._num_armed and part == self._next:
            self._num_armed -= 1
            self._next = next(self._order)
            print(f"fault: {part}", file=sys.stderr, flush=True)
            raise RuntimeError(f"injected at {part}")


def check_when_idle() -> None:
    """Check the scheduler's state after each step that leaves nothing to do."""
    step = Engine.step

    def checked(self: Engine) -> list[RequestOutput]:
        outputs = step(self)
        if not self.has_unfinished():
            self.scheduler.check_integrity()
            assert not self.stats.kv_blocks_used, "blocks of no sequence are in use"
        return outputs

    Engine.step = checked  # type: ignore[method-assign]


def shrink_send_buffers() -> None:
    """Give each connection a send buffer of a few events; the kernel's may grow to 4 MiB."""
    made = H11Protocol.connection_made

    def shrunk(self: H11Protocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        made(self, transport)

    H11Protocol.connection_made = shrunk  # type: ignore[method-assign]


if __name__ == "__main__":
    faults = Faults()
    faults.add(Scheduler, "schedule")
    faults.add(ModelRunner, "launch")
    faults.add(ModelRunner, "launch", after=True)
    faults.add(Scheduler, "update")
    faults.add(OutputProcessor, "outputs")
    faults.begin()
    check_when_idle()
    shrink_send_buffers()
    signal.signal(signal.SIGUSR1, faults.arm)
    main()
