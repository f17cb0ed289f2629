"""Target interface of the load driver: send requests, receive timed chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..metrics.trace import StepRecord
from ..workloads.workload import WorkloadItem


@dataclass(frozen=True, slots=True)
class Chunk:
    """One streamed chunk of a request: tokens, its end, or an error.

    Attributes:
        time: `time.perf_counter()` at the delivery.
        num_tokens: tokens in the chunk; 0 for one that carries only the end or an error.
        error: why the request failed; empty otherwise.
        token_ids: the tokens without an end token, where the target knows them.
    """

    request_id: str
    time: float
    num_tokens: int
    text: str = ""
    finished: bool = False
    error: str = ""
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()


class Target(Protocol):
    """A server or an in-process engine: takes requests, returns timed chunks."""

    name: str

    def send(self, item: WorkloadItem) -> None:
        """Submit a request without blocking; a rejection is returned as a chunk with an error."""
        ...

    def receive(self, until: float | None) -> list[Chunk]:
        """Wait for chunks, at most until the clock reads `until` (None: without a limit)."""
        ...

    def cancel(self) -> None:
        """Abort all requests in flight."""
        ...

    def take_steps(self, origin: float) -> list[StepRecord]:
        """Engine steps since the last call, timed from `origin`; empty where the target has no step trace."""
        ...
