"""What a load driver needs of the thing under test, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..metrics.trace import StepRecord
from ..workloads.workload import WorkloadItem


@dataclass(frozen=True, slots=True)
class Chunk:
    """One delivery of tokens for one request, or its end, or its failure.

    Attributes:
        time: `time.perf_counter()` at the delivery.
        num_tokens: tokens in it; 0 for a delivery that carries only the end or an error.
        error: why the request failed; empty while it has not.
    """

    request_id: str
    time: float
    num_tokens: int
    text: str = ""
    finished: bool = False
    error: str = ""
    cached_tokens: int = 0


class Target(Protocol):
    """A server, or an engine in this process: requests go in, chunks with their times come out."""

    name: str

    def send(self, item: WorkloadItem) -> None:
        """Hand over a request. Does not wait; a refusal comes back as a chunk with an error."""
        ...

    def receive(self, until: float | None) -> list[Chunk]:
        """Wait for deliveries, at most until the clock reads `until` (None: as long as it takes)."""
        ...

    def cancel(self) -> None:
        """Drop everything that is in flight."""
        ...

    def take_steps(self, origin: float) -> list[StepRecord]:
        """Steps since the last call, timed from `origin`; empty where they cannot be seen."""
        ...
